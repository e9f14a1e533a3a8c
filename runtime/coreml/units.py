"""Which compute units Core ML may use for what: one choice for the bundle, and another for the verify head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvstore.errors import InputInvalid

Units = Literal["all", "cpuAndGPU", "cpuAndNeuralEngine", "cpuOnly"]
UNITS: tuple[Units, ...] = get_args(Units)

HEAD_WORDS: dict[str, Units] = {"cpu": "cpuOnly", "gpu": "cpuAndGPU", "ane": "cpuAndNeuralEngine", "all": "all"}
"""The words of ``CORELLM_VERIFY_HEAD_CU`` and ``--verify-head-units``."""


@dataclass(frozen=True, slots=True)
class UnitsPolicy:
    """``bundle``: for chunks and the sequential head. ``verify_head``: for the batched heads."""

    bundle: Units
    verify_head: Units

    @classmethod
    def choose(cls, asked: Units | None, wished: Units | None, verify_head: str | None) -> UnitsPolicy:
        """``asked`` by the user, else ``wished`` by the bundle's manifest, else ``all``. ``verify_head`` is one of ``HEAD_WORDS``.

        Without it the verify head avoids the Neural Engine, on which a published head answered 0 for every row: it runs on
        ``cpuOnly`` where the bundle may use the Neural Engine, and elsewhere as the bundle does.
        """
        bundle: Units = asked or wished or "all"
        if verify_head is None:
            return cls(bundle, "cpuOnly" if bundle in ("all", "cpuAndNeuralEngine") else bundle)
        if verify_head not in HEAD_WORDS:
            raise InputInvalid(
                f"compute units of the verify head: expected one of {', '.join(HEAD_WORDS)}, found {verify_head!r}. Set "
                "CORELLM_VERIFY_HEAD_CU or --verify-head-units to one of them, or leave both out.",
                expected=list(HEAD_WORDS),
                found=verify_head,
            )
        return cls(bundle, HEAD_WORDS[verify_head])
