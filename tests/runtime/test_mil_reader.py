"""Small programs of our own: each form of the text that is read, and each refusal with file, line, expected and found."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.mil import Compiled, open_model
from runtime.mil.compiled import LIMIT as compiled_limit
from runtime.mil.sections import DEPTH_LIMIT as depth_limit
from runtime.mil.text import LIMIT as statement_limit
from runtime.mlpackage import Blob, Const, Name, Package, PackageError, PackageMissing, TensorSpec
from runtime.ops import OperationUnsupported
from runtime.portable import PortableEngine

GOOD = """\
program(1.3)
[buildInfo = dict<string, string>({{"coremlc-version", "3505.4.1"}, {"made;by", "us }"}})]
{
    func decode<ios18>(tensor<fp16, [2, 3]> x) {
        tensor<fp16, [2, 3]> w = const()[name = string("w"), val = tensor<fp16, [2, 3]>(BLOBFILE(path = string("@model_path/weights/weight.bin"), offset = uint64(64)))];
        tensor<int32, [2]> axes = const()[name = string("axes"), val = tensor<int32, [2]>([0, -1])];
        tensor<fp16, [2, 3]> s = add(x = x, y = w)[name = string("s")];
        tensor<fp16, [2, 6]> y = concat(axis = int32(1), interleave = bool(false), values = (s, x))[name = string("y")];
    } -> (y, s);
    func prefill_4<ios18>(tensor<fp16, [2, 3]> x)
    [FlexibleShapeInformation = tuple<tuple<string>>((("x", {{"x", [2; 3]}})))] {
        tensor<fp16, [2, 3]> y = mul(x = x, y = fp16(0x1.8p+1));
    } -> (y);
}
"""
"""Lines are numbered in the tests below."""


def good_weights() -> bytearray:
    data = np.arange(6, dtype=np.float16).tobytes()
    header = struct.pack("<IIQQQ", 0xDEADBEEF, 1, len(data), 128, 0).ljust(64, b"\0")
    return bytearray(bytes(64) + header + data)


def write(root: Path, text: str | bytes = GOOD, weights: bytes | None = None) -> Path:
    path = root / "c.mlmodelc"
    (path / "weights").mkdir(parents=True, exist_ok=True)
    (path / "model.mil").write_bytes(text if isinstance(text, bytes) else text.encode())
    (path / "weights" / "weight.bin").write_bytes(good_weights() if weights is None else weights)
    return path


def read_all(path: Path) -> None:
    opened = Compiled.open(path)
    for function in opened.program().functions:
        for op in function.ops:
            for args in [*op.inputs.values(), tuple(op.attributes.values())]:
                for value in args:
                    if not isinstance(value, Name):
                        opened.array(value)


def refusal(root: Path, text: str | bytes = GOOD, weights: bytes | None = None) -> PackageError:
    with pytest.raises(PackageError) as caught:
        read_all(write(root, text, weights))
    return caught.value


def one(root: Path, statement: str, output: str = "y") -> Any:
    """The only operation of a function over x: fp16[4]."""
    text = f"program(1.0){{func main<ios16>(tensor<fp16, [4]> x) {{ {statement} }} -> ({output});}}"
    (op,) = Compiled.open(write(root, text)).function().ops
    return op


def test_the_good_program_is_good(tmp_path: Path) -> None:
    path = write(tmp_path)
    read_all(path)
    opened = Compiled.open(path)
    assert opened.functions == ("decode", "prefill_4") and opened.default_function is None
    decode = opened.function("decode")
    assert decode is opened.function("decode")
    assert decode.inputs == {"x": TensorSpec((2, 3), "fp16")}
    assert list(decode.outputs.items()) == [("y", TensorSpec((2, 6), "fp16")), ("s", TensorSpec((2, 3), "fp16"))]
    weight = decode.ops[0].attributes["val"]
    assert weight == Blob(TensorSpec((2, 3), "fp16"), "@model_path/weights/weight.bin", 64)
    assert isinstance(weight, Blob) and opened.blob(weight).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not opened.blob(weight).flags.owndata
    assert decode.ops[3].inputs["values"] == (Name("s"), Name("x"))
    (inline,) = opened.function("prefill_4").ops[0].inputs["y"]
    assert isinstance(inline, Const) and inline.array == np.float16(3) and not inline.array.flags.writeable


VALUES: dict[str, tuple[Any, str, Any]] = {
    "int32(5)": ((), "int32", 5),
    "tensor<int32, []>(-5)": ((), "int32", -5),
    "uint64(18446744073709551615)": ((), "uint64", 2**64 - 1),
    "int4(-8)": ((), "int4", -8),
    "bool(true)": ((), "bool", True),
    "tensor<bool, [2]>([false, true])": ((2,), "bool", [False, True]),
    'string("a\\"b\\\\n\\n; } // é")': ((), "string", 'a"b\\n\n; } // é'),
    'tensor<string, [2]>(["a", ""])': ((2,), "string", ["a", ""]),
    "fp16(0x1.8p+3)": ((), "fp16", 12.0),
    "fp16(-0x1p-24)": ((), "fp16", -(2.0**-24)),
    "fp16(1)": ((), "fp16", 1.0),
    "fp16(1e-1)": ((), "fp16", float(np.float16(0.1))),
    "fp32(0x1.99999ap-4)": ((), "fp32", float(np.float32(0.1))),
    "fp32(-0.5)": ((), "fp32", -0.5),
    "fp16(-inf)": ((), "fp16", float("-inf")),
    "fp32(infinity)": ((), "fp32", float("inf")),
    "fp16(-65504)": ((), "fp16", -65504.0),
    "tensor<fp16, [1]>(0x1p+0)": ((1,), "fp16", [1.0]),
    "tensor<fp16, [3]>([0x1p+0, -0x1.8p+1, 0])": ((3,), "fp16", [1.0, -3.0, 0.0]),
    "tensor<int8, [2, 2]>([[1, 2], [3, 4]])": ((2, 2), "int8", [[1, 2], [3, 4]]),
    "tensor<int8, [2, 2]>([1, 2, 3, 4])": ((2, 2), "int8", [[1, 2], [3, 4]]),
    "tensor<int32, [0]>([])": ((0,), "int32", []),
    "tensor<int32, [2, 1, 2]>([[[1, 2]], [[3, 4]]])": ((2, 1, 2), "int32", [[[1, 2]], [[3, 4]]]),
}


@pytest.mark.parametrize("written", VALUES)
def test_values(tmp_path: Path, written: str) -> None:
    shape, dtype, expected = VALUES[written]
    (value,) = one(tmp_path, f"tensor<fp16, [4]> y = f(v = {written});").inputs["v"]
    assert isinstance(value, Const)
    assert value.spec == TensorSpec(shape, dtype) and value.array.tolist() == expected and value.array.shape == shape
    assert value.array.dtype == value.spec.numpy


def test_a_minus_zero_stays_one(tmp_path: Path) -> None:
    (value,) = one(tmp_path, "tensor<fp16, [4]> y = f(v = fp16(-0x0p+0));").inputs["v"]
    assert value.array.tobytes() == np.float16(-0.0).tobytes()


@pytest.mark.parametrize("outputs", ["fp16 y, tensor<fp16, [3]> z", "(fp16 y, tensor<fp16, [3]> z)"])
def test_several_outputs(tmp_path: Path, outputs: str) -> None:
    op = one(tmp_path, f"{outputs} = split(x = x);", "z, y")
    assert op.outputs == (("y", TensorSpec((), "fp16")), ("z", TensorSpec((3,), "fp16")))


def test_names_that_are_also_types(tmp_path: Path) -> None:
    op = one(tmp_path, "fp16 string = inf(tensor = x, int32 = x, v = (x, fp16(1)));", "string")
    assert op.type == "inf" and op.name == "string" and op.inputs["tensor"] == op.inputs["int32"] == (Name("x"),)
    assert [type(arg) for arg in op.inputs["v"]] == [Name, Const]


def test_the_default_function_is_the_only_one_or_main(tmp_path: Path) -> None:
    body = "(fp16 x) { fp16 y = abs(x = x); } -> (y);"
    for names, default in (("decode", "decode"), ("a main b", "main"), ("a b", None)):
        functions = "".join(f"func {name}<ios18>{body}" for name in names.split())
        opened = Compiled.open(write(tmp_path, f"program(1.3) {{ {functions} }}"))
        assert opened.default_function == default
        if default is None:
            with pytest.raises(PackageError, match="function: expected one of a, b, found no name, and no default"):
                opened.function()
        else:
            assert opened.function().name == default


def test_a_function_nobody_asks_for_is_not_taken_apart(tmp_path: Path) -> None:
    opened = Compiled.open(write(tmp_path, GOOD.replace("mul(x = x, y = fp16(0x1.8p+1))", "what is this")))
    assert opened.function("decode").name == "decode"
    with pytest.raises(PackageError, match=r"c\.mlmodelc/model\.mil: line 12: function prefill_4: op 0"):
        opened.function("prefill_4")


def test_an_operation_that_is_not_implemented_is_refused_when_its_function_is_loaded(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("mul(x", "warp(x"))
    engine = PortableEngine(tmp_path)
    assert engine.function("c.mlpackage", "decode").name == "decode"
    with pytest.raises(OperationUnsupported, match=r"c\.mlpackage:prefill_4: operations: .* found warp"):
        engine.function("c.mlpackage", "prefill_4")


def test_the_compiled_folder_comes_before_the_package(tmp_path: Path) -> None:
    (tmp_path / "c.mlpackage").mkdir()
    with pytest.raises(PackageMissing, match="Manifest"):
        open_model(tmp_path, "c.mlpackage")
    write(tmp_path)
    for name in ("c.mlpackage", "c.mlmodelc"):
        assert isinstance(open_model(tmp_path, name), Compiled)
    assert not isinstance(open_model(tmp_path, "c.mlmodelc"), Package)


def test_an_absent_model_is_another_error_than_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "old.mlmodelc").mkdir()
    for name in ("none.mlmodelc", "old.mlmodelc"):
        with pytest.raises(
            PackageMissing, match=rf"{name}: expected a compiled ML Program with a model\.mil"
        ) as caught:
            Compiled.open(tmp_path / name)
        assert isinstance(caught.value, FileNotFoundError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


X = "tensor<fp16, [2, 3]> x"
# name: (what stands in GOOD, what stands there instead, line, in the field, in expected or found)
CHANGES: dict[str, tuple[str, str, int, str, str]] = {
    "another language": ("program(1.3)", "module(1.3)", 1, "the program", "'module'"),
    "a version of the future": ("program(1.3)", "program(2.0)", 1, "the program", "1.x"),
    "something before the brace": ("program(1.3)", "program(1.3) more", 1, "the program", "'more'"),
    "no function": (GOOD[GOOD.index("    func decode") :], "}", 4, "the program", "a function"),
    "a function twice": ("func prefill_4", "func decode", 10, "a function", "'decode' twice"),
    "something between functions": ("    func prefill_4", "    1 func prefill_4", 10, "a function", "'func'"),
    "something after the program": ("} -> (y);\n}\n", "} -> (y);\n}\nx", 15, "after the program", "'x'"),
    "a second program": ("} -> (y);\n}\n", "} -> (y);\n}\n{}", 15, "after the program", "'{'"),
    "a statement without an end": ("name = string(\"y\")];", "name = string(\"y\")]", 8, "after the last statement", "'tensor'"),
    "an empty statement": ("string(\"y\")];", "string(\"y\")];;", 8, "op 4", "a type"),
    "a bracket that closes another": ("[2, 3]> x) {\n        tensor", "[2, 3)> x) {\n        tensor", 4, "bracket ')'", "'['"),
    "a bracket nobody opened": ("program(1.3)", "program(1.3))", 1, "bracket ')'", "none"),
    "a bracket too many": ("int32(1)", "int32(1))", 8, "bracket ')'", "'{'"),
    "a string without an end": ('string("w")', 'string("w)', 5, "string", "its end"),
    "a comment without an end": ("tensor<int32, [2]> axes", "/* tensor<int32, [2]> axes", 6, "comment", "the end of the file"),
    "an escape nobody knows": ('string("w")', 'string("\\q")', 5, "op 0 (const)", "escape"),
    "a letter from elsewhere": ("add(x = x", "add(x = ξ", 7, "op 2 (add)", "'ξ'"),
    "no opset": ("decode<ios18>", "decode", 4, "function decode: inputs", "'<'"),
    "an input twice": (f"decode<ios18>({X})", f"decode<ios18>({X}, {X})", 4, "function decode: inputs", "distinct names"),
    "an output twice": ("-> (y, s)", "-> (y, y)", 9, "function decode: outputs", "distinct"),
    "an output nobody makes": ("-> (y, s)", "-> (y, z)", 9, "function decode: outputs", "'z'"),
    "no outputs": ("-> (y, s)", "-> ()", 9, "function decode: outputs", "none"),
    "a state": (f"decode<ios18>({X})", "decode<ios18>(state<tensor<fp16, [2, 3]>> x)", 4, "function decode: inputs", "a state"),
    "a list": ("tensor<fp16, [2, 3]> s =", "list<tensor<fp16, [2, 3]>> s =", 7, "op 2", "a list"),
    "a shape that may change": (f"decode<ios18>({X})", "decode<ios18>(tensor<fp16, [2, ?]> x)", 4, "inputs", "fixed sizes"),
    "a type nobody knows": ("tensor<fp16, [2, 3]> s =", "tensor<fp8e4m3fn, [2, 3]> s =", 7, "op 2", "'fp8e4m3fn'"),
    "a negative size": ("tensor<fp16, [2, 3]> s =", "tensor<fp16, [2, -3]> s =", 7, "op 2", "'-3'"),
    "a size of another alphabet": ("tensor<fp16, [2, 3]> s =", "tensor<fp16, [2, ²]> s =", 7, "op 2", "a size"),
    "an absurd size": ("tensor<fp16, [2, 3]> s =", f"tensor<fp16, [{10**15}, 3]> s =", 7, "op 2", "at most 68719476736"),
    "too many dimensions": ("tensor<fp16, [2, 3]> s =", f"tensor<fp16, {[1] * 17}> s =", 7, "op 2", "16 dimensions"),
    "a name from nowhere": ("add(x = x", "add(x = z", 7, "op 2 (add)", "'z'"),
    "a name made later": ("add(x = x", "add(x = y", 7, "op 2 (add)", "'y'"),
    "a name made twice": ("[2, 3]> s = add", "[2, 3]> w = add", 7, "op 2", "a new name"),
    "an input made again": ("[2, 3]> s = add", "[2, 3]> x = add", 7, "op 2", "a new name"),
    "an argument twice": ("add(x = x, y = w)", "add(x = x, x = w)", 7, "op 2 (add)", "distinct keys"),
    "an attribute twice": ('[name = string("s")]', '[name = string("s"), name = string("t")]', 7, "op 2 (add)", "distinct keys"),
    "a list in a list of arguments": ("(s, x))[name", "((s, x)))[name", 8, "op 3 (concat)", "earlier output"),
    "a constant without value": ('[name = string("axes"), val = tensor<int32, [2]>([0, -1])]', "", 6, "op 1 (const)", "no val"),
    "a constant of another type": ("tensor<int32, [2]> axes", "tensor<int32, [3]> axes", 6, "op 1 (const)", "int32[2]"),
    "a number too few": ("([0, -1])", "([0])", 6, "op 1 (const)", "2 values"),
    "a number too many": ("([0, -1])", "([0, -1, 2])", 6, "op 1 (const)", "2 values"),
    "numbers nested otherwise": ("([0, -1])", "([[0, -1]])", 6, "op 1 (const)", "nested"),
    "numbers without a comma": ("([0, -1])", "([0 -1])", 6, "op 1 (const)", "','"),
    "a comma without a number": ("([0, -1])", "([0, ])", 6, "op 1 (const)", "']'"),
    "a number that doesn't fit": ("([0, -1])", "([0, 2147483648])", 6, "op 1 (const)", "2147483648"),
    "a number of many digits": ("([0, -1])", f"([0, {'9' * 5000}])", 6, "op 1 (const)", "999"),
    "a fraction for an integer": ("([0, -1])", "([0, 0.5])", 6, "op 1 (const)", "0.5"),
    "a word for an integer": ("([0, -1])", "([0, x])", 6, "op 1 (const)", "'x'"),
    "a number for a truth": ("bool(false)", "bool(0)", 8, "op 3 (concat)", "true or false"),
    "a number for a string": ('string("w")', "string(5)", 5, "op 0 (const)", "not a string"),
    "a half out of range": ("fp16(0x1.8p+1)", "fp16(65520)", 12, "op 0 (mul)", "65520"),
    "a word for a half": ("fp16(0x1.8p+1)", "fp16(x)", 12, "op 0 (mul)", "'x'"),
    "a half without digits": ("fp16(0x1.8p+1)", "fp16(0x)", 12, "op 0 (mul)", "0x"),
    "an exponent without end": ("fp16(0x1.8p+1)", f"fp16(0x1p+{'9' * 400})", 12, "op 0 (mul)", "fp16"),
    "a loop": ("add(x = x, y = w)[", "add(x = x, y = w) { fp16 a = abs(x = x); } -> (a) [", 7, "op 2 (add)", "nested blocks"),
    "an offset of another type": ("uint64(64)", "int32(64)", 5, "op 0 (const)", "uint64"),
    "no offset": (", offset = uint64(64)", "", 5, "op 0 (const)", "','"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_malformed_programs(tmp_path: Path, name: str) -> None:
    old, new, line, field, said = CHANGES[name]
    assert old in GOOD
    error = refusal(tmp_path, GOOD.replace(old, new, 1))
    assert error.details["field"].startswith(f"line {line}: "), error
    assert field in error.details["field"], error
    assert said in error.details["expected"] + error.details["found"], error
    assert error.details["file"] == "c.mlmodelc/model.mil" and len(str(error)) < 1000
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


WEIGHTS: dict[str, tuple[str, str, str]] = {
    "not there": ("weights/weight.bin", "weights/other.bin", "weight file"),
    "elsewhere": ("@model_path/weights", "/etc", "weight file"),
    "out of the folder": ("@model_path/weights/weight.bin", "@model_path/../weight.bin", "weight file"),
    "a very long name": ("weights/weight.bin", "w" * 5000, "weight file"),
    "a name with a very long part": ("weights/weight.bin", "w" * 300, "weight file"),
    "offset out of the file": ("uint64(64)", "uint64(640)", "header offset"),
    "offset between boundaries": ("uint64(64)", "uint64(65)", "header offset"),
    "an offset beyond all files": ("uint64(64)", f"uint64({2**64 - 64})", "header offset"),
    "no header there": ("uint64(64)", "uint64(0)", "sentinel"),
    "another type": ("tensor<fp16, [2, 3]> w = const()[name = string(\"w\"), val = tensor<fp16,", "tensor<int8, [2, 3]> w = const()[name = string(\"w\"), val = tensor<int8,", "element type"),
    "another size": ("tensor<fp16, [2, 3]> w = const()[name = string(\"w\"), val = tensor<fp16, [2, 3]>", "tensor<fp16, [2, 4]> w = const()[name = string(\"w\"), val = tensor<fp16, [2, 4]>", "data bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_are_not_there_or_not_those(tmp_path: Path, name: str) -> None:
    old, new, field = WEIGHTS[name]
    error = refusal(tmp_path, GOOD.replace(old, new))
    assert field in error.details["field"] and error.details["file"].startswith("c.mlmodelc/")
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("weights", "field"), [(b"", "file size"), (bytes(63), "file size"), (bytes(good_weights()[:-1]), "data range")]
)
def test_weight_files_that_are_cut_off(tmp_path: Path, weights: bytes, field: str) -> None:
    error = refusal(tmp_path, weights=weights)
    assert field in error.details["field"] and error.details["file"] == "c.mlmodelc/weights/weight.bin"


def test_a_model_without_its_weight_file(tmp_path: Path) -> None:
    path = write(tmp_path)
    (path / "weights" / "weight.bin").unlink()
    with pytest.raises(PackageError, match=r"model\.mil: weight file: .* found no @model_path/weights/weight\.bin"):
        read_all(path)


def test_the_example_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "bundle.md").read_text(encoding="utf-8")
    example = page.split("## Compiled models")[1].split("```text\n")[1].split("```")[0]
    function = Compiled.open(write(tmp_path, example)).function("decode")
    assert [op.type for op in function.ops] == ["const", "mul", "mul"]
    (factor,) = function.ops[1].inputs["y"]
    assert isinstance(factor, Const) and factor.array == np.float16(0.1875)


def test_the_documented_limits_are_the_real_ones() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bundle.md").read_text(encoding="utf-8")
    said = page.split("## Compiled models")[1].split("## ")[0]
    assert f"at most {compiled_limit >> 20} MiB, a statement {statement_limit >> 20} MiB" in said
    assert f"nested at most {depth_limit} deep" in said
