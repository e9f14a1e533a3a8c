"""What one run of a verb did, as records: the command line says what happens when, and this measures and writes.

    with Journal.at(path, "generate", note) as journal:
        journal.opened(bundle, engine)             # a session record
        journal.enter("restore")                   # a message begins; if something fails from here on, this was the phase
        journal.restored(session.restore("book"))  # a kv record
        journal.enter("generate")                  # its prompt is held
        journal.message(session.generate(32), reused_tokens=1500)

A conversation does the last lines once a turn, beginning each with ``enter("prefill")``; one that times its turns itself calls `Journal.turn`.

Without a path nothing is looked at or written. A failing metrics file never fails the verb: it is said once, and nothing more is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal

from kvstore.saving import Saved
from runtime.bundle import Bundle
from runtime.engine import Engine
from runtime.reports import Generation, Restored
from runtime.speculation import SpeculationStats

from . import machine
from .generated import per_token, spec_fields, spec_of
from .logfile import LogFile
from .records import Ours, Record, encode

Phase = Literal["open", "prefill", "restore", "generate", "save", "export", "import"]
Operation = Literal["save", "restore", "export", "import"]


class Journal:
    """Made by `at`. ``tell``: where to say that the file can't be written any more."""

    def __init__(self, file: LogFile | None, verb: str, tell: Callable[[str], None]) -> None:
        self._file = file
        self._verb = verb
        self._tell = tell
        self._run = os.urandom(8).hex()
        self._about: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}
        self._bundle: Bundle | None = None
        self._engine: Engine | None = None
        self._machine: tuple[str, str, str] | None = None
        self._phase: Phase = "open"
        self._began: float | None = None
        self._prefilled: float | None = None
        self._footprint: float | None = None

    @classmethod
    def at(cls, path: Path | None, verb: str, tell: Callable[[str], None]) -> Journal:
        """Opens the file at ``path``. Raises OSError, before any work is done, where that can't be."""
        return cls(None if path is None else LogFile(path), verb, tell)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def opened(self, bundle: Bundle, engine: Engine) -> None:
        """A session begins: what the records from here on are about."""
        if self._file is None:
            return
        said = engine.describe()
        self._bundle, self._engine = bundle, engine
        self._ours = {name: said[name] for name in ("engine", "compute", "machine") if name in said}
        self.about(bundle.config.name, bundle, compute_units=said.get("compute_units"))
        self._write("session", models=[bundle.config.name])

    def about(self, model: str, bundle: Bundle | None, compute_units: str | None = None) -> None:
        """The same without a session and without an engine; no record."""
        self._about = {"model_id": model or None, "compute_units": compute_units}
        if bundle is not None:
            self._about |= {"bundle_folder": bundle.root.name, "context_length": bundle.config.ctx}

    def enter(self, phase: Phase) -> None:
        """From here on ``phase`` runs. ``prefill`` and ``restore`` begin a message, if none has begun; ``generate`` ends its prompt."""
        self._phase = phase
        if phase in ("prefill", "restore") and self._began is None:
            self._began = perf_counter()
        if phase in ("generate", "save") and self._prefilled is None:
            self._prefilled = perf_counter()
            self._footprint = None if self._file is None else machine.footprint_mb()

    def message(self, made: Generation, *, reused_tokens: int) -> None:
        """A generation has ended; ``reused_tokens`` of what it continues were not computed for it. The next `enter` begins another message."""
        self.turn(
            made.finish,
            made.seconds,
            made.prompt,
            reused_tokens,
            self._prefill_seconds() or 0.0,
            made.speculation,
            footprint_after_prefill=self._footprint,
        )

    def turn(
        self,
        finish: str,
        seconds: Sequence[float],
        prompt_tokens: int,
        reused_tokens: int,
        prefill_seconds: float,
        speculation: SpeculationStats | None = None,
        *,
        footprint_after_prefill: float | None = None,
    ) -> None:
        """`message`, for a caller that timed its prompt itself; ``seconds``: of each token that was given out."""
        self._began = self._prefilled = self._footprint = None
        if self._file is None:
            return
        prefill, end = prefill_seconds, machine.footprint_mb()
        self._write(
            "message",
            spec_of(speculation),
            spec_enabled=speculation is not None,
            **spec_fields(speculation),
            prompt_tokens=prompt_tokens,
            reused_tokens=reused_tokens,
            generated_tokens=len(seconds),
            finish_reason=finish,
            model_load_seconds=self._load_seconds(),
            prefill_seconds=prefill,
            ttft_seconds=prefill + seconds[0] if seconds else None,
            decode_tok_per_sec=(len(seconds) - 1) / max(sum(seconds[1:]), 1e-9) if len(seconds) > 1 else None,
            **per_token(seconds),
            feed_widths=self._feed_widths(),
            footprint_after_prefill_mb=footprint_after_prefill,
            footprint_at_end_mb=end,
            peak_footprint_mb=_most(footprint_after_prefill, end),
            available_memory_mb=machine.available_memory_mb(),
        )

    def restored(self, restored: Restored) -> None:
        """A snapshot's rows were read; the tokens past them, if any, were fed after that."""
        self.kv(
            "restore",
            restored.bytes,
            restored.seconds,
            prompt_tokens=restored.n,
            reused_tokens=restored.reused_tokens,
        )

    def saved(self, saved: Saved, seconds: float, reused_tokens: int | None = None) -> None:
        """A snapshot was saved, in ``seconds``."""
        if saved.snapshot is not None:
            tokens = saved.snapshot.tokens
            self.kv(
                "save",
                tokens * saved.snapshot.layout.bytes_per_token,
                seconds,
                prompt_tokens=tokens,
                reused_tokens=reused_tokens,
                written_bytes=saved.written_bytes,
                new_objects=saved.written_objects,
            )

    def kv(
        self,
        op: Operation,
        size: int,
        seconds: float,
        *,
        prompt_tokens: int,
        reused_tokens: int | None = None,
        written_bytes: int | None = None,
        new_objects: int | None = None,
    ) -> None:
        """KV of ``size`` bytes was saved, restored, exported or imported. ``written_bytes``: of them, files that were not there yet."""
        if self._file is None:
            return
        self._write(
            "kv",
            Ours(written_bytes=written_bytes, new_objects=new_objects),
            kv_op=op,
            kv_bytes=size,
            kv_duration_seconds=seconds,
            prompt_tokens=prompt_tokens,
            reused_tokens=reused_tokens,
            prefill_seconds=self._prefill_seconds() if op == "save" else None,
            model_load_seconds=self._load_seconds(),
            feed_widths=self._feed_widths(),
            peak_footprint_mb=_most(self._footprint, machine.footprint_mb()),
        )

    def failed(self, error: BaseException, phase: Phase | None = None) -> None:
        """Something ended with ``error``, in ``phase`` or the one that was entered. Its class is recorded and no more: a message may name files and snapshots."""
        reason = "Interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
        if isinstance(error, OSError) and (code := errno.errorcode.get(error.errno or 0)) is not None:
            reason = f"{reason} {code}"
        self._write("error", error_phase=phase or self._phase, error_reason=reason)

    def _write(self, kind: str, ours: Ours | None = None, **fields: Any) -> None:
        if self._file is None:
            return
        if self._machine is None:
            self._machine = (machine.device_model(), machine.os_version(), machine.app_build())
        level, state = machine.battery()
        device_model, os_version, app_build = self._machine
        more = {} if ours is None else {name: getattr(ours, name) for name in ours.__struct_fields__}
        line = encode(
            Record(
                kind=kind,
                timestamp=machine.timestamp(),
                device_model=device_model,
                os_version=os_version,
                app_build=app_build,
                battery_level=level,
                battery_state=state,
                kvferry=Ours(**{**more, **self._ours, "run": self._run, "verb": self._verb}),
                **self._about,
                **fields,
            )
        )
        try:
            self._file.append(line)
        except OSError as error:
            self._tell(f"--metrics: {self._file.path}: {error.strerror or error}. Nothing more is recorded there.")
            self._file.close()
            self._file = None

    def _prefill_seconds(self) -> float | None:
        return None if self._began is None or self._prefilled is None else self._prefilled - self._began

    def _load_seconds(self) -> float | None:
        return None if self._engine is None else sum(self._engine.ledger.seconds().values())

    def _feed_widths(self) -> list[int] | None:
        if self._bundle is None or self._engine is None:
            return None
        widths = {function: width for width, function in self._bundle.config.prefill_functions.items()}
        return sorted({widths[load.function] for load in self._engine.ledger.loaded if load.function in widths})


def _most(*found: float | None) -> float | None:
    return max((one for one in found if one is not None), default=None)
