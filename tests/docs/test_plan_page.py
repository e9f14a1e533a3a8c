"""docs/plan.md: its tables are those of the profiles and of E2B's geometry, and the words about them are true."""

from __future__ import annotations

from plan_tables import PAGE, TABLES, rewritten, sizes

from runtime.plan import make_plan
from runtime.profile import FIELDS, GIB, IPHONE15, IPHONE17PRO


def test_the_tables_are_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->" in page for name in TABLES)
    assert rewritten(page) == page, "run: PYTHONPATH=tests python tests/docs/plan_tables.py"


def test_a_changed_number_is_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rewritten(page.replace("**killed**", "fits")) == page != page.replace("**killed**", "fits")


def test_what_the_page_says_of_the_phones() -> None:
    page = PAGE.read_text(encoding="utf-8")
    chat, one, both = (
        make_plan(sizes(), IPHONE17PRO, n).outcome("prefill", False).ledgers.bytes / GIB for n in (30, 300, 1500)
    )
    assert f"{chat:.2f} GiB; {one:.1f} GiB with one wide function, {both:.1f} GiB with both" in page
    wired = make_plan(sizes(), IPHONE15, 1500).outcome("restore", False).ledgers.wired_bytes / GIB
    assert f"{wired:.2f} GiB for `decode` and the sequential head" in page
    assert f"{len(FIELDS)}\nnumbers" in page
    for profile, killed in ((IPHONE15, {"prefill"}), (IPHONE17PRO, set())):
        plan = make_plan(sizes(), profile, 1500)
        assert {outcome.way for outcome in plan.outcomes if outcome.verdict == "killed"} == killed
