"""Whether a device can continue a context of some length, and how: which functions are resident, the three ledgers, and the times.

Every outcome follows from sizes of the model (`plan_sizes`) and numbers of the device (`profile`); nothing here knows a model or a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.errors import Refused
from kvstore.layout import BLOCK, Layout, trim_start
from kvstore.plaintext import size_text

from .chain import schedule
from .decoding import ContextOverflow
from .engine import called
from .plan_sizes import FunctionSize, ModelSizes
from .profile import MB, Profile

Way = Literal["restore", "prefill"]
"""``restore``: the KV comes from a store, or is fed token by token, and ``decode`` alone is resident. ``prefill``: by the published schedule."""

WAYS: tuple[Way, ...] = ("restore", "prefill")
HeadUnits = Literal["cpu", "ane"]
Verdict = Literal["fits", "stalls", "killed"]
"""``stalls``: fits, but what a round of speculation reads does not stay in memory from round to round."""


class WouldBeKilled(Refused):
    """The ledgers come to more than the device lets an app have. ``details``: way, speculation, expected, found (bytes)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a ledger, in bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Ledgers:
    """``footprint``: what the app allocates, which its own counter shows. ``wired``: weights that the system holds for it outside of that
    counter. ``mapped``: pages of files that are in memory and can be dropped and read again."""

    footprint: tuple[Entry, ...]
    wired: tuple[Entry, ...]
    mapped: tuple[Entry, ...]

    @property
    def footprint_bytes(self) -> int:
        return sum(entry.bytes for entry in self.footprint)

    @property
    def wired_bytes(self) -> int:
        return sum(entry.bytes for entry in self.wired)

    @property
    def mapped_bytes(self) -> int:
        return sum(entry.bytes for entry in self.mapped)

    @property
    def bytes(self) -> int:
        """All three together."""
        return self.footprint_bytes + self.wired_bytes + self.mapped_bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way, with speculation or without. ``functions``: resident ones, as ``package:function``. ``reread_seconds``: what reading the batched
    heads again adds to each round, for ``stalls``."""

    way: Way
    speculation: bool
    functions: tuple[str, ...]
    ledgers: Ledgers
    verdict: Verdict
    reread_seconds: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """``tokens`` of context on a device. ``whole_bytes`` and ``trimmed_bytes``: KV to carry, without headers. ``download_seconds`` and ``restore_seconds`` are for
    one of them, as ``trimmed`` says; ``feed_seconds``: every token through ``decode`` instead. ``break_even_tokens``: length from which downloading
    and restoring is faster than feeding; None: none that fits the context. ``tables_bytes``: mapped, of which little is ever in memory."""

    model: str
    profile: Profile
    tokens: int
    trimmed: bool
    outcomes: tuple[Outcome, ...]
    speculation: bool
    kv_bytes_per_token: int
    whole_bytes: int
    trimmed_bytes: int
    tables_bytes: int
    download_seconds: float
    restore_seconds: float
    feed_seconds: float
    break_even_tokens: int | None

    def outcome(self, way: Way, speculation: bool) -> Outcome:
        """Raises `Refused` for speculation with a model that has no batched head."""
        for one in self.outcomes:
            if (one.way, one.speculation) == (way, speculation):
                return one
        raise Refused(
            f"speculation: expected a bundle with a batched head (corellm.verify), found none in {self.model}. Leave --speculation out."
        )

    def require(self, way: Way, speculation: bool) -> Outcome:
        """The outcome, unless it is ``killed``. Raises `WouldBeKilled`."""
        found = self.outcome(way, speculation)
        if found.verdict != "killed":
            return found
        ledgers, limit = found.ledgers, self.profile.limit_bytes
        told = f"{way}{' with speculation' if speculation else ''} of {self.tokens:,} tokens of {self.model} on {self.profile.name}"
        others = [o for o in self.outcomes if o.verdict != "killed"]
        instead = f"What fits: {'; '.join(map(told_way, others))}" if others else "Nothing fits: take a smaller model"
        raise WouldBeKilled(
            f"{told}: expected at most {size_text(limit)} in all ({self.profile.limit_share.value:g} of its memory: {self.profile.limit_share.source}), found "
            f"{size_text(ledgers.bytes)}: footprint {size_text(ledgers.footprint_bytes)}, wired {size_text(ledgers.wired_bytes)}, mapped "
            f"{size_text(ledgers.mapped_bytes)}. {instead}. --explain shows every line.",
            way=way,
            speculation=speculation,
            expected=limit,
            found=ledgers.bytes,
        )


def told_way(outcome: Outcome) -> str:
    """For people."""
    return f"{outcome.way}, speculation" if outcome.speculation else outcome.way


def make_plan(
    sizes: ModelSizes, profile: Profile, tokens: int, *, trimmed: bool = False, head_units: HeadUnits = "cpu"
) -> Plan:
    """``head_units``: where the batched heads run; the published app takes the CPU. Raises `ContextOverflow`."""
    config, layout = sizes.config, sizes.layout
    if not 1 <= tokens < config.ctx:
        raise ContextOverflow(
            f"--context: expected 1 to {config.ctx - 1:,} tokens (of the context's {config.ctx:,} positions one stays free), found {tokens:,}.",
            expected=config.ctx - 1,
            found=tokens,
        )
    speculations = (False, True) if config.lmhead_batched else (False,)
    outcomes = [_outcome(sizes, profile, tokens, way, spec, head_units) for way in WAYS for spec in speculations]
    step = _decode_seconds(sizes, profile)
    lengths = (kv_bytes(layout, tokens, trimmed=False), kv_bytes(layout, tokens, trimmed=True))
    carried = lengths[trimmed]
    ahead = (
        n for n in range(1, config.ctx) if _carry_seconds(profile, kv_bytes(layout, n, trimmed=trimmed)) < n * step
    )
    return Plan(
        model=config.name,
        profile=profile,
        tokens=tokens,
        trimmed=trimmed,
        outcomes=tuple(outcomes),
        speculation=profile.speculates and bool(config.lmhead_batched),
        kv_bytes_per_token=layout.bytes_per_token,
        whole_bytes=lengths[False],
        trimmed_bytes=lengths[True],
        tables_bytes=sum(table.bytes for table in sizes.tables()),
        download_seconds=carried / (profile.download_mb_per_second.value * MB),
        restore_seconds=profile.restore_start_seconds.value + carried / (profile.restore_mb_per_second.value * MB),
        feed_seconds=tokens * step,
        break_even_tokens=next(ahead, None),
    )


def kv_bytes(layout: Layout, tokens: int, *, trimmed: bool) -> int:
    """KV of a snapshot of ``tokens`` tokens: all of it, or what continuing from its end needs."""
    starts = [trim_start(group.window, tokens) * BLOCK if trimmed else 0 for group in layout.groups]
    return sum((tokens - start) * layout.row_bytes(i) for i, start in enumerate(starts))


def _carry_seconds(profile: Profile, count: int) -> float:
    rates = (profile.download_mb_per_second.value, profile.restore_mb_per_second.value)
    return profile.restore_start_seconds.value + sum(count / (rate * MB) for rate in rates)


def _decode_seconds(sizes: ModelSizes, profile: Profile) -> float:
    """Of one token: in proportion to the weights that it reads."""
    config = sizes.config
    read = sum(sizes.functions[package, config.decode_function].weights for package in config.chunks)
    read += sizes.functions[config.lmhead, None].weights
    return profile.decode_ms_per_token.value / 1000 * read / profile.decode_weight_bytes.value


def _outcome(
    sizes: ModelSizes, profile: Profile, tokens: int, way: Way, speculation: bool, head_units: HeadUnits
) -> Outcome:
    config = sizes.config
    widths = _widths(sizes, tokens) if way == "prefill" else ()
    heads = sorted(set(config.lmhead_batched.values())) if speculation else []
    named = {config.prefill_functions[width]: width for width in widths}
    if speculation:
        named |= {name: width for width, name in config.verify_functions.items()}
    functions = [called(p, name) for name in (config.decode_function, *named) for p in config.chunks]
    functions += [called(package, None) for package in (config.lmhead, *heads)]
    ledgers = Ledgers(
        tuple(_footprint(sizes, profile, named, heads)),
        tuple(_wired(sizes, profile, named, heads if head_units == "ane" else [])),
        tuple(_mapped(sizes, profile, heads if head_units == "cpu" else [])),
    )
    every_round = sum(sizes.functions[package, None].weights for package in heads) if head_units == "cpu" else 0
    stalls = every_round > profile.clean_kept_bytes.value
    verdict: Verdict = "killed" if ledgers.bytes > profile.limit_bytes else "stalls" if stalls else "fits"
    seconds = every_round / (profile.reread_mb_per_second.value * MB) if verdict == "stalls" else None
    return Outcome(way, speculation, tuple(functions), ledgers, verdict, seconds)


def _widths(sizes: ModelSizes, tokens: int) -> Sequence[int]:
    """The prefill widths that the schedule uses, in its order."""
    config = sizes.config
    steps = schedule(0, tokens, config.ctx, config.prefill_widths, config.plain_width)
    return list(dict.fromkeys(step.width for step in steps if step.kind != "decode"))


def _footprint(sizes: ModelSizes, profile: Profile, named: dict[str, int], heads: Sequence[str]) -> Iterator[Entry]:
    config, layout = sizes.config, sizes.layout
    yield Entry("app", int(profile.app_bytes.value))
    yield Entry(f"KV of {config.ctx:,} positions", config.ctx * layout.bytes_per_token)
    for name in (config.decode_function, *named):
        yield Entry(f"buffers of {name}", sum(sizes.functions[package, name].buffers for package in config.chunks))
    yield Entry("buffers of the heads", sum(sizes.functions[head, None].buffers for head in (config.lmhead, *heads)))
    if named:
        largest = max(sizes.functions[package, name].buffers for name in named for package in config.chunks)
        yield Entry("working set of the largest prefill function", int(profile.working_share.value * largest))


def _wired(sizes: ModelSizes, profile: Profile, named: dict[str, int], heads: Sequence[str]) -> Iterator[Entry]:
    config, share = sizes.config, profile.wired_per_stored.value

    def chunks(name: str) -> int:
        return sum(sizes.functions[package, name].weights for package in config.chunks)

    def weights(one: FunctionSize, copies: float) -> int:
        return int(one.weights * copies * share)

    yield Entry(f"weights of {config.decode_function}", int(chunks(config.decode_function) * share))
    yield Entry(f"weights of {config.lmhead}", weights(sizes.functions[config.lmhead, None], 1))
    for name, width in named.items():
        wide = width >= profile.wide_from_tokens.value
        copies = (profile.wide_copies if wide else profile.narrow_copies).value
        yield Entry(f"weights of {name}", int(chunks(name) * copies * share))
    for package in heads:
        yield Entry(f"weights of {package}", weights(sizes.functions[package, None], profile.head_ane_copies.value))


def _mapped(sizes: ModelSizes, profile: Profile, heads: Sequence[str]) -> Iterator[Entry]:
    """Tables at most: as if the context filled up with tokens that are all different and whose rows share no page."""
    page = int(profile.page_bytes.value)
    for table in sizes.tables():
        yield Entry(f"rows of {table.name}", table.touched(sizes.config.ctx, page))
    for package in heads:
        yield Entry(f"weights of {package}", sizes.functions[package, None].weights)
