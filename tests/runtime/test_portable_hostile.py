"""Packages that read well and still contradict themselves: refused with a name, at load or at the first call."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from graphs import Writer, planned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import KVError
from runtime.ops import OperationUnsupported
from runtime.portable import PortableEngine
from runtime.portable.function import ProgramInconsistent

MODEL = "Data/com.apple.CoreML/model.mlmodel"


def test_shapes_that_cannot_come_out_are_named_when_it_runs() -> None:
    w = Writer(hidden=(2, 3))
    w("reshape", (4, 2), x="hidden", shape=[4, 2], _name="turned")
    with pytest.raises(ProgramInconsistent, match="main: turned: expected values of the declared shapes"):
        planned(w.function("turned"))({"hidden": np.zeros((2, 3), np.float16)})


def test_constants_of_the_wrong_form_are_refused_at_load() -> None:
    w = Writer(hidden=(2, 3))
    w("softmax", (2, 3), x="hidden", axis=[0, 1])
    with pytest.raises(OperationUnsupported, match="fit together"):
        planned(w.function("softmax_0"))
    w = Writer(hidden=(2, 3))
    w("gelu", (2, 3))
    with pytest.raises(OperationUnsupported, match="input x: expected one value, found 0"):
        planned(w.function("gelu_0"))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_model_runs_or_is_refused(tiny_bundle: Path, tmp_path: Path, data: st.DataObject) -> None:
    package = tmp_path / "head.mlpackage"
    if not package.exists():
        shutil.copytree(tiny_bundle / "lmhead.mlpackage", package)
    raw = bytearray((tiny_bundle / "lmhead.mlpackage" / MODEL).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (package / MODEL).write_bytes(raw)
    try:
        head = PortableEngine(tmp_path).function("head.mlpackage", None)
        head({name: np.zeros(spec.shape, spec.numpy) for name, spec in head.inputs.items()})
    except KVError as error:
        assert str(error) and error.details
