"""Writes a `.mlmodelc` folder from one of our packages: the same program as text, in the forms that Core ML's text has.

Ours, from the IR alone: it shares no code with the reader.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.mlpackage import Arg, Blob, Const, Function, Name, Op, Package, TensorSpec, Value

WEIGHTS = "weights/weight.bin"


@dataclass(frozen=True)
class Style:
    """How a program is written down.

    ``inline``: constants stand in the arguments instead of operations of their own. ``scalars``: ``int32(5)``, as in
    version 1.3, instead of ``tensor<int32, []>(5)``, as in 1.0. ``gap``: what stands between tokens; ``named``:
    whether operations carry their name as an attribute; ``flat``: higher ranks as one list instead of nested ones.
    """

    inline: bool = False
    scalars: bool = True
    gap: str = " "
    named: bool = True
    flat: bool = False


def compiled_bundle(bundle: Path, out: Path, style: Style = Style(), *, record: bool = True) -> Path:
    """A copy of ``bundle`` in which every package is compiled; its JSON and, if asked for, its record are unchanged."""
    shutil.copytree(bundle, out, ignore=shutil.ignore_patterns("*.mlpackage", *([] if record else ["kvferry.json"])))
    for package in bundle.glob("*.mlpackage"):
        compile_package(package, out / package.with_suffix(".mlmodelc").name, style)
    return out


def compile_package(package: Path, out: Path, style: Style = Style()) -> Path:
    """The compiled copy of one package. What Core ML puts beside program and weights is there, and holds nonsense."""
    weights = next(package.rglob(WEIGHTS))
    (out / "weights").mkdir(parents=True)
    (out / "analytics").mkdir()
    shutil.copyfile(weights, out / WEIGHTS)
    for name in ("coremldata.bin", "metadata.json", "analytics/coremldata.bin"):
        (out / name).write_bytes(b"nobody reads this")
    opened = Package.open(package)
    (out / "model.mil").write_text(program_text(opened.program().functions, style), encoding="utf-8")
    return out


def program_text(functions: tuple[Function, ...], style: Style = Style()) -> str:
    """The whole ``model.mil``."""
    version, text = ("1.3", "string") if style.scalars else ("1.0", "tensor<string, []>")
    head = (
        f'program({version})\n[buildInfo = dict<{text}, {text}>({{{{"coremlc-version", "}};{{"}}, {{"a", ""}}}})]\n{{\n'
    )
    return head + "".join(_Printer(style).function(function) for function in functions) + "}\n"


class _Printer:
    def __init__(self, style: Style) -> None:
        self._style = style
        self._inlined: Mapping[str, Value] = {}

    def function(self, function: Function) -> str:
        if self._style.inline:
            constants = {op.name: op.attributes["val"] for op in function.ops if op.type == "const"}
            self._inlined = {name: value for name, value in constants.items() if name not in function.outputs}
        inputs = ", ".join(f"{_type(spec)} {name}" for name, spec in function.inputs.items())
        lines = [f"    func {function.name}<ios18>({inputs}) {{"]
        lines += [f"            {self._op(op)};" for op in function.ops if op.name not in self._inlined]
        lines += [f"        }} -> ({', '.join(function.outputs)});\n"]
        text = "\n".join(lines)
        return text if self._style.gap == " " else _spread(text, self._style.gap)

    def _op(self, op: Op) -> str:
        outputs = ", ".join(f"{_type(spec, self._style.scalars)} {name}" for name, spec in op.outputs)
        inputs = ", ".join(f"{key} = {self._args(args, key)}" for key, args in op.inputs.items())
        attributes = {k: v for k, v in op.attributes.items() if self._style.named or k != "name"}
        listed = ", ".join(f"{key} = {self._value(value)}" for key, value in attributes.items())
        return f"{outputs} = {op.type}({inputs})" + (f"[{listed}]" if listed else "")

    def _args(self, args: tuple[Arg, ...], key: str) -> str:
        written = [self._arg(arg) for arg in args]
        return f"({', '.join(written)})" if key == "values" or len(written) != 1 else written[0]

    def _arg(self, arg: Arg) -> str:
        if isinstance(arg, Name):
            return self._value(self._inlined[arg.name]) if arg.name in self._inlined else arg.name
        return self._value(arg)

    def _value(self, value: Value) -> str:
        if isinstance(value, Blob):
            path, offset = (
                Const(TensorSpec((), "string"), _held(value.file)),
                Const(TensorSpec((), "uint64"), _held(value.offset)),
            )
            inside = f"BLOBFILE(path = {self._value(path)}, offset = {self._value(offset)})"
        else:
            array = value.array.reshape(-1) if self._style.flat else value.array
            inside = _literal(array.tolist() if value.spec.shape else value.array[()], value.spec.dtype)
        return f"{_type(value.spec, self._style.scalars)}({inside})"


def _held(value: object) -> Any:
    made = np.empty((), object)
    made[()] = value
    return made


def _type(spec: TensorSpec, scalars: bool = True) -> str:
    if not spec.shape and scalars:
        return spec.dtype
    return f"tensor<{spec.dtype}, [{', '.join(map(str, spec.shape))}]>"


def _literal(value: object, dtype: str) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_literal(item, dtype) for item in value)}]"
    if dtype == "string":
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if dtype == "bool":
        return "true" if value else "false"
    return hex_float(float(value)) if dtype.startswith("fp") else str(int(value))  # type: ignore[arg-type,call-overload]


def hex_float(value: float) -> str:
    """``value`` as C++ writes it: without zeros at the end of the fraction."""
    if not np.isfinite(value):
        return str(value)
    mantissa, _, exponent = value.hex().partition("p")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{exponent}"


def _spread(text: str, gap: str) -> str:
    """``text`` with ``gap`` between all tokens but those of a string."""
    return "".join(part if part.startswith('"') else _between(part, gap) for part in _parts(text))


def _parts(text: str) -> Iterator[str]:
    at = 0
    while (start := text.find('"', at)) >= 0:
        yield text[at:start]
        end = start + 1
        while text[end] != '"':
            end += 2 if text[end] == "\\" else 1
        yield text[start : end + 1]
        at = end + 1
    yield text[at:]


def _between(text: str, gap: str) -> str:
    return re.sub(r"->|[()\[\]{}<>,;=]", lambda mark: f"{gap}{mark[0]}{gap}", text)
