"""Packages that are not what they should be: each refusal names the file, the field, what was expected and found."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.mlpackage import Blob, Package, PackageError, PackageMissing
from runtime.mlpackage.schema import parse_model

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
FP16, INT32 = 10, 23


def tensor_type(message: Any, dtype: int, shape: tuple[int, ...]) -> None:
    message.tensorType.dataType = dtype
    message.tensorType.rank = len(shape)
    for size in shape:
        message.tensorType.dimensions.add().constant.size = size


def good_model() -> Any:
    """y = x + w with w in the weight file and an inline constant beside it; two functions."""
    model = parse_model(b"")
    for name in ("decode", "prefill_4"):
        model.description.functions.add(name=name)
        function = model.mlProgram.functions.add(key=name).value
        function.opset = "CoreML8"
        tensor_type(function.inputs.add(name="x").type, FP16, (2, 3))
        block = function.blocks.add(key="CoreML8").value
        weight = block.operations.add(type="const")
        tensor_type(weight.outputs.add(name="w").type, FP16, (2, 3))
        value = weight.attributes.add(key="val").value
        tensor_type(value.type, FP16, (2, 3))
        value.blobFileValue.fileName = "@model_path/weights/weight.bin"
        value.blobFileValue.offset = 64
        axes = block.operations.add(type="const")
        tensor_type(axes.outputs.add(name="axes").type, INT32, (2,))
        value = axes.attributes.add(key="val").value
        tensor_type(value.type, INT32, (2,))
        value.immediateValue.tensor.ints.values.extend([0, -1])
        add = block.operations.add(type="add")
        add.inputs.add(key="x").value.arguments.add(name="x")
        add.inputs.add(key="y").value.arguments.add(name="w")
        tensor_type(add.outputs.add(name="y").type, FP16, (2, 3))
        block.outputs.append("y")
    return model


def good_weights() -> bytearray:
    data = np.arange(6, dtype=np.float16).tobytes()
    header = struct.pack("<IIQQQ", 0xDEADBEEF, 1, len(data), 128, 0).ljust(64, b"\0")
    return bytearray(bytes(64) + header + data)


def write(root: Path, model: Any = None, weights: bytes | None = None, manifest: bytes | None = None) -> Path:
    path = root / "p.mlpackage"
    (path / WEIGHTS).parent.mkdir(parents=True, exist_ok=True)
    raw = model if isinstance(model, bytes) else (model or good_model()).SerializeToString()
    (path / MODEL).write_bytes(raw)
    (path / WEIGHTS).write_bytes(good_weights() if weights is None else weights)
    entries = {"id": {"path": "com.apple.CoreML/model.mlmodel"}}
    usual = json.dumps({"itemInfoEntries": entries, "rootModelIdentifier": "id"}).encode()
    (path / "Manifest.json").write_bytes(usual if manifest is None else manifest)
    return path


def read_all(path: Path) -> None:
    package = Package.open(path)
    for name in package.functions:
        for op in package.function(name).ops:
            for value in op.attributes.values():
                package.array(value)


def test_the_good_package_is_good(tmp_path: Path) -> None:
    path = write(tmp_path)
    read_all(path)
    package = Package.open(path)
    assert package.functions == ("decode", "prefill_4")
    value = package.function().ops[0].attributes["val"]
    assert isinstance(value, Blob) and package.blob(value).tolist() == [[0, 1, 2], [3, 4, 5]]


def function(model: Any) -> Any:
    return model.mlProgram.functions[0].value


def block(model: Any) -> Any:
    return function(model).blocks[0].value


def value_of(model: Any, op: int) -> Any:
    return block(model).operations[op].attributes[0].value


def set_(target: Callable[[Any], Any], **fields: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, value in fields.items():
            setattr(target(model), name, value)

    return change


def _state(model: Any) -> None:
    function(model).inputs[0].type.stateType.SetInParent()
    function(model).inputs[0].type.ClearField("tensorType")


def _no_description(model: Any) -> None:
    del model.description.functions[:]


MODELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no ML program": (lambda m: m.ClearField("mlProgram"), "mlProgram"),
    "a function nobody describes": (lambda m: m.description.functions.pop(), "description.functions"),
    "two functions and no order": (_no_description, "description.functions"),
    "a default that isn't there": (set_(lambda m: m.description, defaultFunctionName="x"), "defaultFunctionName"),
    "the same function twice": (set_(lambda m: m.mlProgram.functions[1], key="decode"), "mlProgram.functions"),
    "no block for the opset": (set_(function, opset="CoreML9"), "block for opset"),
    "an unknown element type": (set_(lambda m: function(m).inputs[0].type.tensorType, dataType=99), "dataType"),
    "a rank that isn't the dimensions'": (set_(lambda m: function(m).inputs[0].type.tensorType, rank=3), "rank"),
    "a rank below nought": (set_(lambda m: function(m).inputs[0].type.tensorType, rank=-1), "rank"),
    "an unknown dimension": (
        lambda m: function(m).inputs[0].type.tensorType.dimensions[0].unknown.SetInParent(),
        "dimensions",
    ),
    "more elements than memory": (
        set_(lambda m: function(m).inputs[0].type.tensorType.dimensions[0].constant, size=1 << 60),
        "elements",
    ),
    "more elements hidden behind a nought": (
        lambda m: (
            set_(lambda m: function(m).inputs[0].type.tensorType.dimensions[0].constant, size=0)(m),
            set_(lambda m: function(m).inputs[0].type.tensorType.dimensions[1].constant, size=1 << 60)(m),
        ),
        "elements",
    ),
    "a state": (_state, "inputs: x"),
    "two inputs of one name": (
        lambda m: function(m).inputs.add(name="x", type=function(m).inputs[0].type),
        "inputs",
    ),
    "a name from nowhere": (
        set_(lambda m: block(m).operations[2].inputs[1].value.arguments[0], name="nobody"),
        "op 2 (add): y",
    ),
    "a value made twice": (set_(lambda m: block(m).operations[2].outputs[0], name="w"), "op 2 (add): outputs"),
    "an output nobody makes": (lambda m: block(m).outputs.append("z"), "outputs"),
    "no output": (lambda m: block(m).outputs.pop(), "outputs"),
    "a constant without a value": (lambda m: block(m).operations[1].attributes.pop(), "op 1 (const)"),
    "an operation without output": (lambda m: block(m).operations[2].outputs.pop(), "op 2 (add)"),
    "control flow": (lambda m: block(m).operations[2].blocks.add(), "nested blocks"),
    "an input key twice": (lambda m: block(m).operations[2].inputs.add(key="x"), "op 2 (add): inputs"),
    "too few inline values": (lambda m: value_of(m, 1).immediateValue.tensor.ints.values.pop(), "op 1 (const): val"),
    "too many inline values": (
        lambda m: value_of(m, 1).immediateValue.tensor.ints.values.append(7),
        "op 1 (const): val",
    ),
    "inline bytes of another length": (
        set_(lambda m: value_of(m, 1).immediateValue.tensor.bytes, values=b"123"),
        "op 1 (const): val",
    ),
    "inline text for a number": (
        lambda m: value_of(m, 1).immediateValue.tensor.strings.values.extend(["a", "b"]),
        "op 1 (const): val",
    ),
    "a blob between headers": (set_(lambda m: value_of(m, 0).blobFileValue, offset=65), "blob at 65: header offset"),
    "a blob past the end": (
        set_(lambda m: value_of(m, 0).blobFileValue, offset=1 << 40),
        "blob at 1099511627776: header offset",
    ),
    "no blob at the offset": (set_(lambda m: value_of(m, 0).blobFileValue, offset=0), "blob at 0: sentinel"),
    "a blob of another type": (
        set_(lambda m: value_of(m, 0).type.tensorType, dataType=INT32),
        "blob at 64: element type",
    ),
    "a blob of another size": (
        set_(lambda m: value_of(m, 0).type.tensorType.dimensions[0].constant, size=3),
        "blob at 64: data bytes",
    ),
    "a weight file elsewhere": (
        set_(lambda m: value_of(m, 0).blobFileValue, fileName="@model_path/../../../../etc/passwd"),
        "weight file",
    ),
    "a weight file without the prefix": (
        set_(lambda m: value_of(m, 0).blobFileValue, fileName="/etc/passwd"),
        "weight file",
    ),
    "a weight file that isn't there": (
        set_(lambda m: value_of(m, 0).blobFileValue, fileName="@model_path/weights/other.bin"),
        "weight file",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path: Path, name: str) -> None:
    change, field = MODELS[name]
    model = good_model()
    change(model)
    with pytest.raises(PackageError) as caught:
        read_all(write(tmp_path, model))
    details = caught.value.details
    assert field in details["field"] and details["file"].startswith("p.mlpackage/")
    assert details["expected"] in str(caught.value) and details["found"] in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.details == details


def header(**fields: int) -> bytes:
    weights = good_weights()
    values = {"sentinel": 0xDEADBEEF, "dtype": 1, "size": 12, "offset": 128, "padding": 0} | fields
    weights[64:96] = struct.pack("<IIQQQ", *values.values())
    return bytes(weights)


WEIGHT_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "file size"),
    "shorter than a header": (bytes(63), "file size"),
    "no sentinel": (header(sentinel=0), "sentinel"),
    "an unknown type": (header(dtype=200), "element type"),
    "more bytes than the file": (header(size=1 << 50), "data range"),
    "a start past the end": (header(offset=1 << 40), "data range"),
    "a start between boundaries": (header(offset=129), "data range"),
    "fewer bytes than the shape": (header(size=10), "data bytes"),
    "cut off": (bytes(good_weights()[:-1]), "data range"),
}


@pytest.mark.parametrize("name", WEIGHT_FILES)
def test_weight_files(tmp_path: Path, name: str) -> None:
    weights, field = WEIGHT_FILES[name]
    with pytest.raises(PackageError) as caught:
        read_all(write(tmp_path, weights=weights))
    assert field in caught.value.details["field"] and caught.value.details["file"].endswith("weight.bin")


MANIFESTS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "content"),
    "a list": (b"[]", "rootModelIdentifier"),
    "no root": (b'{"itemInfoEntries": {}}', "rootModelIdentifier"),
    "a root without an entry": (b'{"itemInfoEntries": {}, "rootModelIdentifier": "id"}', "rootModelIdentifier"),
    "a path out of the package": (
        b'{"itemInfoEntries": {"id": {"path": "../../secret"}}, "rootModelIdentifier": "id"}',
        "path",
    ),
    "an absolute path": (b'{"itemInfoEntries": {"id": {"path": "/etc/passwd"}}, "rootModelIdentifier": "id"}', "path"),
    "a path to nothing": (b'{"itemInfoEntries": {"id": {"path": "no"}}, "rootModelIdentifier": "id"}', "path"),
    "a number for a path": (b'{"itemInfoEntries": {"id": {"path": 7}}, "rootModelIdentifier": "id"}', "path"),
    "a path of 5,000 letters": (
        b'{"itemInfoEntries": {"id": {"path": "' + b"m" * 5000 + b'"}}, "rootModelIdentifier": "id"}',
        "path",
    ),
    "a part of 300 letters": (
        b'{"itemInfoEntries": {"id": {"path": "' + b"m" * 300 + b'"}}, "rootModelIdentifier": "id"}',
        "path",
    ),
    "a path with a zero": (b'{"itemInfoEntries": {"id": {"path": "a\\u0000b"}}, "rootModelIdentifier": "id"}', "path"),
    "half a surrogate pair": (b'{"itemInfoEntries": {"id": {"path": "\\ud800"}}, "rootModelIdentifier": "id"}', "path"),
    "lists without end": (b"[" * 500_000, "content"),
    "far too long": (b" " * (1 << 20) + b"{}", "file size"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(tmp_path: Path, name: str) -> None:
    manifest, field = MANIFESTS[name]
    with pytest.raises(PackageError) as caught:
        read_all(write(tmp_path, manifest=manifest))
    assert field in caught.value.details["field"] and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["w" * 5000, "w" * 300, "a/../b", "/etc/hostname", "a\0b"])
def test_weight_files_by_names_that_no_file_has(tmp_path: Path, name: str) -> None:
    model = good_model()
    for entry in model.mlProgram.functions:
        entry.value.blocks[0].value.operations[0].attributes[0].value.blobFileValue.fileName = f"@model_path/{name}"
    with pytest.raises(PackageError) as caught:
        read_all(write(tmp_path, model))
    assert caught.value.details["field"] == "weight file" and len(str(caught.value)) < 500


def test_an_absent_package_is_another_error_than_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(PackageMissing, match=r"none\.mlpackage") as caught:
        Package.open(tmp_path / "none.mlpackage")
    assert isinstance(caught.value, FileNotFoundError) and not isinstance(caught.value, PackageError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_bytes_that_are_no_message(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="protobuf message"):
        read_all(write(tmp_path, b"\xff" * 40))


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(good_model().SerializeToString())
    weights = good_weights()
    target = data.draw(st.sampled_from([raw, weights]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(target) - 1))
        match data.draw(st.sampled_from(["flip", "set", "cut", "repeat"])):
            case "flip":
                target[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                target[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
            case "cut":
                del target[at + 1 :]
            case "repeat":
                target[at:at] = target[max(0, at - 9) : at]
    try:
        read_all(write(tmp_path, bytes(raw), bytes(weights)))
    except PackageError as error:
        assert error.details["field"]


def test_a_refusal_is_short_however_long_the_file_is() -> None:
    error = PackageError.of("model.mlmodel", "f" * 9000, ["decode"], ["x" * 100_000])
    assert (
        len(str(error)) < 2500 and "x" * 900 in str(error) and all(len(str(v)) < 1100 for v in error.details.values())
    )
