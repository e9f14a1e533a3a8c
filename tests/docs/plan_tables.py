"""Writes the tables of docs/plan.md from the profiles and Gemma 4 E2B's geometry: ``PYTHONPATH=tests python tests/docs/plan_tables.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gemma4_e2b import E2B

from kvstore.plaintext import size_text
from runtime.build import Packing
from runtime.build.gemma4.config import read_config
from runtime.build.gemma4.sizes import gemma4_sizes
from runtime.plan import make_plan, told_way
from runtime.plan_sizes import ModelSizes
from runtime.profile import FIELDS, PROFILES, Profile

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
CONTEXTS = (30, 300, 1500)
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SHORT = {"write-up": "w", "measured here": "m", "assumption": "a"}


def sizes() -> ModelSizes:
    """E2B as published: 6-bit chunks and verification head, int8 tables."""
    return gemma4_sizes(read_config(E2B, "gemma-4-e2b"), Packing(verify_head="pal6"))


def outcomes() -> Iterator[Sequence[str]]:
    yield "profile (limit)", "tokens", "way", "functions", "footprint", "wired", "mapped", "in all", "verdict"
    for profile in PROFILES.values():
        for tokens in CONTEXTS:
            for outcome in make_plan(sizes(), profile, tokens).outcomes:
                if outcome.way == "restore" and tokens != CONTEXTS[0]:
                    continue  # the same for every length
                ledgers = outcome.ledgers
                parts = (ledgers.footprint_bytes, ledgers.wired_bytes, ledgers.mapped_bytes, ledgers.bytes)
                yield (
                    f"{profile.name} ({size_text(profile.limit_bytes)})",
                    "any" if outcome.way == "restore" else f"{tokens:,}",
                    told_way(outcome),
                    str(len(outcome.functions)),
                    *map(size_text, parts),
                    outcome.verdict if outcome.verdict == "fits" else f"**{outcome.verdict}**",
                )


def times() -> Iterator[Sequence[str]]:
    yield (
        "profile",
        "tokens",
        "KV whole",
        "trimmed",
        "download, trimmed",
        "restore, trimmed",
        "feed through decode",
        "carrying is faster from, tokens",
    )
    for profile in PROFILES.values():
        for tokens in CONTEXTS:
            plan = make_plan(sizes(), profile, tokens, trimmed=True)
            even = plan.break_even_tokens
            yield (
                profile.name,
                f"{tokens:,}",
                size_text(plan.whole_bytes),
                size_text(plan.trimmed_bytes),
                f"{plan.download_seconds:.2f} s",
                f"{plan.restore_seconds:.2f} s",
                f"{plan.feed_seconds:.1f} s",
                "never" if even is None else f"{even:,}",
            )


def numbers() -> Iterator[Sequence[str]]:
    yield "field", "what", *PROFILES
    for name, rule in FIELDS.items():
        yield f"`{name}`", rule.what, *(_number(profile, name) for profile in PROFILES.values())


def reasons() -> Iterator[Sequence[str]]:
    yield "field", "profiles", "source", "why"
    for name in FIELDS:
        told: dict[tuple[str, str], list[str]] = {}
        for profile in PROFILES.values():
            figure = profile.figures()[name]
            told.setdefault((figure.source, figure.why), []).append(profile.name)
        for (source, why), profiles in told.items():
            yield f"`{name}`", "all" if len(profiles) == len(PROFILES) else ", ".join(profiles), source, why


def _number(profile: Profile, name: str) -> str:
    figure = profile.figures()[name]
    value = size_text(int(figure.value)) if name.endswith("_bytes") else f"{figure.value:,g}"
    return f"{value} ({_SHORT[figure.source]})"


TABLES = {"outcomes": outcomes, "times": times, "numbers": numbers, "reasons": reasons}


def rewritten(page: str) -> str:
    """The page with every marked table made anew."""

    def made(found: re.Match[str]) -> str:
        head, *rows = TABLES[found[2]]()
        lines = [head, ["---"] * len(head), *rows]
        return found[1] + "".join(f"| {' | '.join(line)} |\n" for line in lines) + found[3]

    return _MARKED.sub(made, page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
