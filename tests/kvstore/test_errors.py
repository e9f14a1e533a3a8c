"""Errors travel: between processes, into JSON, and by the builtin that a caller may already catch."""

from __future__ import annotations

import inspect
import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from kvmemory import IDENTITY, LAYOUT, save

from kvstore import Identity, Store, errors
from kvstore.errors import IdentityMismatch, KVError, Missing, ObjectMissing, WeightsMismatch
from kvstore.identity import require_same

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KVError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_picklable(kind: type[KVError]) -> None:
    error = kind("what was expected, what was found", path="x", found=3, fields=[("a", 1, b"2")])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) == "what was expected, what was found"
    assert dict(again.details) == dict(error.details)
    assert isinstance(again, KVError) and 1 <= again.exit_code <= 10


def test_every_family_has_its_exit_code() -> None:
    codes = {kind.__name__: kind.exit_code for kind in KINDS}
    assert (codes["Missing"], codes["SnapshotMissing"], codes["ObjectMissing"], codes["StoreMissing"]) == (3, 3, 3, 3)
    assert {codes[n] for n in codes if n.endswith("Corrupt")} == {4}
    assert {codes[n] for n in codes if n.endswith("Mismatch")} == {5}
    assert (codes["FormatTooNew"], codes["Refused"], codes["Unreachable"]) == (6, 7, 8)


def test_builtins_that_callers_may_catch() -> None:
    assert issubclass(Missing, KeyError) and str(ObjectMissing("gone")) == "gone"
    assert issubclass(errors.InputInvalid, ValueError) and issubclass(errors.LabelInvalid, ValueError)
    assert not issubclass(errors.ObjectCorrupt, KeyError)


def _fails(path: Path) -> None:
    with Store.open(path, create=False) as store:
        store.match("nothing")


def test_an_error_crosses_a_process_pool(tmp_path: Path) -> None:
    Store.open(tmp_path / "s").close()
    with (
        ProcessPoolExecutor(1) as pool,
        pytest.raises(errors.SnapshotMissing, match="no snapshot named 'nothing'") as caught,
    ):
        pool.submit(_fails, tmp_path / "s").result()
    assert caught.value.details["label"] == "nothing"


def test_a_mismatch_crosses_too() -> None:
    with pytest.raises(WeightsMismatch) as caught:
        require_same((IDENTITY, LAYOUT), (Identity.of({**IDENTITY.wire(), "weights": "w1"}), LAYOUT), "it")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, IdentityMismatch) and again.fields == caught.value.fields == (("weights", "w0", "w1"),)


def test_details_are_plain_enough_for_json(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        save(store, [1, 2], name="a")
        for act in (lambda: store.match("b"), lambda: store.match("a", at=9), lambda: save(store, [1], name=" ")):
            with pytest.raises(KVError) as caught:
                act()
            assert json.loads(json.dumps(dict(caught.value.details))) is not None
