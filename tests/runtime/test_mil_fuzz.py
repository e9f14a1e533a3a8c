"""Whatever the text holds, reading it ends in a program or in a named error, and its cost is bounded by its length."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mil_printer import Style, program_text
from test_mil_reader import GOOD, good_weights, read_all, write

from kvstore.errors import KVError
from runtime.mil.reader import TextReader
from runtime.mil.text import Text
from runtime.mlpackage import Package, PackageError
from runtime.portable import PortableEngine


def refused(root: Path, text: str | bytes) -> PackageError | None:
    """How reading ``text`` ends: with its refusal, or ``None`` for a program."""
    try:
        read_all(write(root, text))
    except PackageError as error:
        assert error.details["field"] and len(str(error)) < 2000
        return error
    return None


def test_a_text_cut_off_anywhere_is_refused_on_opening() -> None:
    for length in range(len(GOOD.rstrip())):
        with pytest.raises(PackageError) as caught:
            TextReader(Text("model.mil", GOOD[:length]))
        assert caught.value.details["field"].startswith("line "), length


def test_a_chunk_of_the_builder_cut_off_is_refused_on_opening(tiny_bundle: Path) -> None:
    functions = Package.open(tiny_bundle / "chunk_0.mlpackage").program().functions[:1]
    text = program_text(functions, Style(inline=True))
    for length in range(0, len(text) - 2, 997):
        with pytest.raises(PackageError, match=r"model\.mil: line \d+: "):
            TextReader(Text("model.mil", text[:length]))


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    raw, weights = bytearray(GOOD.encode()), good_weights()
    target = data.draw(st.sampled_from([raw, raw, raw, weights]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(target) - 1))
        match data.draw(st.sampled_from(["flip", "set", "cut", "repeat", "word"])):
            case "flip":
                target[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                target[at] = data.draw(st.sampled_from([*b'(){}[]<>,;=:"/*-0x.?\\\n', 0, 0xFF]))
            case "cut":
                del target[at : at + data.draw(st.integers(1, 40))]
            case "repeat":
                target[at:at] = target[max(0, at - data.draw(st.integers(1, 80))) : at]
            case "word":
                words = [
                    b"tensor<",
                    b"fp16(",
                    b"BLOBFILE(",
                    b"state<",
                    b"const()",
                    b"inf",
                    b"x",
                    b"99999999999",
                    b"/*",
                    b"*/",
                    b"//",
                ]
                target[at:at] = data.draw(st.sampled_from(words))
        if not target:
            break
    path = write(tmp_path, bytes(raw), bytes(weights))
    try:
        read_all(path)
    except PackageError as error:
        assert error.details["field"]
    engine = PortableEngine(tmp_path)
    for name in ("decode", "prefill_4"):
        try:
            engine.function("c.mlpackage", name)
        except KVError as error:
            assert str(error)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet='(){}[]<>,;=:"/*-+0123456789xpe.?\\\n tensorfuncpag', max_size=200))
def test_any_text_as_a_statement(tmp_path: Path, text: str) -> None:
    refused(tmp_path, GOOD.replace("add(x = x, y = w)", text))


LONG = 1 << 20
HOSTILE = {
    "comments that never end": "/*" * LONG,
    "comments that never end, after a program": GOOD + "/*" * LONG,
    "strings that never end": '"' + "\\" * LONG,
    "quotes": '"\n' * LONG,
    "blanks": " \n\t" * LONG,
    "blanks after a program, and one more thing": GOOD + " \n" * LONG + "x",
    "slashes": GOOD.replace("add(", "add" + "/ " * LONG + "("),
    "brackets that open": "(" * LONG,
    "brackets that open in an argument": GOOD.replace("([0, -1])", "[" * LONG),
    "brackets that close": "}" * LONG,
    "a million functions": "program(1.3) {" + "func a() {} -> ();" * (1 << 16) + "}",
    "a type of many dimensions": GOOD.replace("[2, 3]> s", f"[{'1, ' * LONG}1]> s"),
    "a name of a million letters": GOOD.replace("> s = add", "> " + "s" * LONG + " = add"),
    "a number of a million digits": GOOD.replace("uint64(64)", f"uint64({'6' * LONG})"),
    "a fraction of a million digits": GOOD.replace("0x1.8p+1", f"0x1.{'8' * LONG}p+9999999"),
    "a statement of 17 million letters": GOOD.replace("add(x = x", "add(" + " " * (17 << 20) + "x = x"),
    "a file of 65 MiB": GOOD + " " * (65 << 20),
    "bytes that are no text": GOOD.encode() + b"\n\xff",
    "nothing": "",
    "zeros": "\0" * LONG,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_refused_in_linear_time(tmp_path: Path, name: str) -> None:
    """Each would take hours if anything in the reader were quadratic in it."""
    if name == "a name of a million letters":
        assert refused(tmp_path, HOSTILE[name]) is not None  # the function doesn't return s
        return
    error = refused(tmp_path, HOSTILE[name])
    assert error is not None and error.details["file"] == "c.mlmodelc/model.mil"


def test_constants_are_bounded_by_what_is_written(tmp_path: Path) -> None:
    """A declared size alone never allocates."""
    error = refused(tmp_path, GOOD.replace("tensor<int32, [2]>", "tensor<int32, [65536, 65536]>"))
    assert error is not None and "inline elements" in error.details["expected"]
    error = refused(tmp_path, GOOD.replace("tensor<int32, [2]>", "tensor<int32, [100000000]>"))
    assert error is not None and "100000000 values" in error.details["expected"]
