"""From the text to the IR: every statement is checked here, once, when its function is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.mlpackage.ir import Arg, Function, Name, Op, TensorSpec, Value

from .sections import Section, split
from .text import Cursor, Text
from .types import at_type, read_type
from .values import read_value

_DEFAULT = "main"


class TextReader:
    """Reads functions of one program text. Making one finds where they are and takes none apart.

    Raises ``PackageError`` for text that is cut off, unbalanced, or has no function or one twice.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._sections: dict[str, Section] = {}
        for section in split(text):
            head = Cursor(text, section.head, section.body - 1, "a function")
            head.skip("func")
            name = head.name()
            if name in self._sections:
                raise head.wrong("distinct names", f"{name!r} twice")
            self._sections[name] = section
        if not self._sections:
            raise text.wrong(len(text.text), "the program", "a function", "none")
        self.names: tuple[str, ...] = tuple(self._sections)

    @property
    def default(self) -> str | None:
        """The only function, or ``main``; ``None`` where there is neither, because the text doesn't say."""
        return self.names[0] if len(self.names) == 1 else _DEFAULT if _DEFAULT in self.names else None

    def function(self, name: str) -> Function:
        """Function ``name`` (one of ``names``). Raises ``PackageError``; reads no weight."""
        section = self._sections[name]
        where = f"function {name}"
        inputs = self._inputs(where, section)
        known = dict(inputs)
        ops = []
        start = section.body
        for index, end in enumerate(section.ends):
            ops.append(_statement(Cursor(self._text, start, end, f"{where}: op {index}"), known))
            start = end + 1
        outputs: dict[str, TensorSpec] = {}
        tail = Cursor(self._text, section.tail, section.end, f"{where}: outputs")
        tail.skip("->", "(")
        for output in _names(tail):
            if output not in known or output in outputs:
                raise tail.wrong("distinct values of the function", repr(output))
            outputs[output] = known[output]
        tail.end()
        if not outputs:
            raise tail.wrong("values of the function", "none")
        return Function(name, inputs, outputs, tuple(ops))

    def _inputs(self, where: str, section: Section) -> dict[str, TensorSpec]:
        head = Cursor(self._text, section.head, section.body - 1, f"{where}: inputs")
        head.skip("func")
        head.name()
        head.skip("<")
        head.name()
        head.skip(">", "(")
        inputs: dict[str, TensorSpec] = {}
        while not head.taken(")"):
            if inputs:
                head.skip(",")
            spec = read_type(head)
            if head.next in inputs:
                raise head.wrong("distinct names")
            inputs[head.name()] = spec
        # what stands in brackets here is advice about shapes for Core ML
        if head.next not in ("", "["):
            head.refuse("'{'")
        return inputs


def _statement(cursor: Cursor, known: dict[str, TensorSpec]) -> Op:
    """``TYPE name = op(key = argument, …)[attribute = value, …]``; adds what it makes to ``known``."""
    outputs: dict[str, TensorSpec] = {}
    in_brackets = cursor.taken("(")
    while True:
        spec = read_type(cursor)
        if cursor.next in known or cursor.next in outputs:
            raise cursor.wrong("a new name")
        outputs[cursor.name()] = spec
        if not cursor.taken(","):
            break
    if in_brackets:
        cursor.skip(")")
    cursor.skip("=")
    kind = cursor.name()
    cursor.field = f"{cursor.field} ({kind})"
    inputs: dict[str, tuple[Arg, ...]] = {}
    cursor.skip("(")
    for key in _keys(cursor, ")", inputs):
        inputs[key] = tuple(_arguments(cursor, known))
    attributes: dict[str, Value] = {}
    if cursor.taken("["):
        for key in _keys(cursor, "]", attributes):
            attributes[key] = read_value(cursor)
    if cursor.next == "{":
        raise cursor.wrong("no nested blocks", "one", "control flow can't run here")
    cursor.end()
    if kind == "const":
        made = next(iter(outputs.values()))
        found = [value.spec for key, value in attributes.items() if key == "val"]
        if len(outputs) != 1 or found != [made]:
            raise cursor.wrong(f"one output, and val of its type {made}", found[0] if found else "no val")
    known.update(outputs)
    return Op(kind, inputs, tuple(outputs.items()), attributes)


def _keys(cursor: Cursor, close: str, seen: dict[str, tuple[Arg, ...]] | dict[str, Value]) -> Iterator[str]:
    """Past ``key =``, and the key, for each entry up to ``close``; who asks reads what follows, into ``seen``."""
    first = True
    while not cursor.taken(close):
        if not first:
            cursor.skip(",")
        first = False
        if cursor.next in seen:
            raise cursor.wrong("distinct keys")
        key = cursor.name()
        cursor.skip("=")
        yield key


def _arguments(cursor: Cursor, known: dict[str, TensorSpec]) -> Iterator[Arg]:
    """One argument, or those of a list in round brackets."""
    if not cursor.taken("("):
        yield _argument(cursor, known)
        return
    first = True
    while not cursor.taken(")"):
        if not first:
            cursor.skip(",")
        first = False
        yield _argument(cursor, known)


def _argument(cursor: Cursor, known: dict[str, TensorSpec]) -> Arg:
    if at_type(cursor):
        return read_value(cursor)
    if cursor.next not in known:
        raise cursor.wrong("a function input or an earlier output")
    return Name(cursor.take())


def _names(cursor: Cursor) -> Iterator[str]:
    """Names up to a closing round bracket."""
    first = True
    while not cursor.taken(")"):
        if not first:
            cursor.skip(",")
        first = False
        yield cursor.name()
