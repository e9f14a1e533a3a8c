"""The drawings of time per token: inside the width, rounds where they are, XML that parses whatever a record says."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from metrics_lines import MESSAGE, STEPPED, line

from runtime.metrics.latency_plot import ROWS, Latencies, latencies, svg, terminal
from runtime.metrics.records import decode

SVG = "{http://www.w3.org/2000/svg}"


def test_rounds_stand_under_their_tokens() -> None:
    shown = latencies(decode(line(STEPPED)))
    assert shown.rounds == ((1, 5), (6, 8))
    title, *rows, marks, legend = terminal(shown, 80).splitlines()
    assert title.startswith("gemma-4-e2b, 2026-11-02T08:15:00Z: milliseconds per token, 8 tokens")
    assert len(rows) == ROWS
    bars = rows[-1].partition("┤")[2]
    assert bars == " █   ██"
    assert marks == " " * (rows[0].index("┤") + 1) + " ^--- ^-"
    assert legend == "^- round of speculation (2)"


def test_one_slow_token_is_cut_off_and_said() -> None:
    shown = Latencies("t", (60.0,) * 30 + (48_500.0,), ())
    text = terminal(shown, 60)
    assert shown.top == 120 and text.splitlines()[1].endswith("▲")
    assert "▲ cut off, up to 48,500 ms" in text and "no rounds of speculation" in text
    assert text.splitlines()[ROWS].endswith("█" * 31)


def test_more_tokens_than_columns_show_the_slowest_of_each_column() -> None:
    millis = [1.0] * 1000
    millis[537] = 1.9
    shown = Latencies("t", tuple(millis), ((537, 540),))
    _, first, *_, marks, legend = terminal(shown, 64).splitlines()
    top = first.partition("┤")[2]
    assert marks.strip() == "^" and len(marks) == len(first), "under the same column"
    assert "a column is the slowest of" in legend
    assert top.strip() in "▁▂▃▄▅▆▇█" and len(top) - 1 == 537 // -(-1000 // (64 - 5))


def test_an_app_record_says_nothing_of_its_rounds() -> None:
    shown = latencies(decode(line(MESSAGE)))
    assert shown.rounds is None and "rounds of speculation: not recorded" in terminal(shown, 80)
    assert latencies(decode(line({**MESSAGE, "specEnabled": False}))).rounds == ()


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=300),
    st.integers(20, 200),
    st.lists(st.tuples(st.integers(0, 299), st.integers(1, 4)), max_size=20),
    st.text(),
)
def test_any_drawing_stays_inside_the_width_and_is_xml(
    millis: list[float], width: int, starts: list[tuple[int, int]], title: str
) -> None:
    rounds = tuple((at, min(at + n, len(millis))) for at, n in starts if at < len(millis))
    shown = Latencies(" ".join(title.split()), tuple(millis), rounds)
    assert all(len(row) <= width for row in terminal(shown, width).splitlines())
    root = ElementTree.fromstring(svg(shown))
    assert root.tag == f"{SVG}svg"
    found = [element.get("class") for element in root.iter(f"{SVG}rect")]
    assert (found.count("token"), found.count("round")) == (len(millis), len(rounds))
    _, _, right, bottom = map(float, root.attrib["viewBox"].split())
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= right and 0 <= y <= y + h <= bottom + 0.01


def test_a_model_cannot_write_markup() -> None:
    hostile = {**MESSAGE, "modelID": "</title><script>alert(1)</script>\x00\x1b&"}
    root = ElementTree.fromstring(svg(latencies(decode(line(hostile)))))
    assert not list(root.iter(f"{SVG}script"))
