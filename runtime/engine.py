"""What a session needs from whatever runs the bundle's functions, and the record of what was loaded.

An engine loads a function when it is first asked for and keeps it. Every load is written into the ledger, which can be
restricted: that is how a decode-only session proves that it opened nothing else.

What the names of a bundle's inputs and outputs mean, and the check of a call's inputs, are the same for every engine
and stand here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from kvstore.errors import KVError, Refused
from runtime.mlpackage import TensorSpec


class FunctionNotAllowed(Refused):
    """A function outside the ledger's allowed set was asked for; nothing of it was loaded."""


class EngineUnavailable(Refused):
    """The engine that was asked for cannot run on this machine, or lacks a package."""


class InputMismatch(KVError, ValueError):
    """A function was called with other inputs than it declares. In a command: the bundle's packages aren't what its description says."""

    exit_code = 4


class Fp16Overflow(KVError, ArithmeticError):
    """A value passed fp16's largest finite number, 65,504, where the program stores it as fp16."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One load: ``function`` is ``None`` for a package's default function.

    ``seconds`` is what loading took, with everything that happens once: compiling the package, specialising the function for
    the machine (Core ML), planning it (portable). A step that loads a function takes this much longer than the next one.
    """

    package: str
    function: str | None
    seconds: float

    @property
    def name(self) -> str:
        """``package:function``, or ``package`` alone for its default function."""
        return called(self.package, self.function)


def called(package: str, function: str | None) -> str:
    """How messages and lineage call a function."""
    return package if function is None else f"{package}:{function}"


_CACHE_INPUT = re.compile(r"[kv]_\d+_in")
_CACHE_OUTPUT = re.compile(r"[kv]_\d+_out")
_STORE_INPUTS = frozenset({"sks", "svs", "skf", "svf"})


def is_cache_input(name: str) -> bool:
    """Whether ``name`` is a K or V input that this chunk also writes."""
    return _CACHE_INPUT.fullmatch(name) is not None


def is_cache_output(name: str) -> bool:
    """Whether ``name`` is a K or V output: the whole cache or the new rows."""
    return _CACHE_OUTPUT.fullmatch(name) is not None


def is_host_cache(name: str) -> bool:
    """Whether ``name`` is an input that reads the host's K or V rows: a layer's own, or those of a store layer."""
    return name in _STORE_INPUTS or is_cache_input(name)


def is_whole_cache(name: str, spec: TensorSpec, inputs: Mapping[str, TensorSpec]) -> bool:
    """Whether output ``name`` of a function with these ``inputs`` is [1, CTX, D], the whole context."""
    context = inputs.get("onehot")
    return (
        is_cache_output(name) and context is not None and len(spec.shape) == 3 and spec.shape[1:2] == context.shape[-1:]
    )


def require_declared(function: str, declared: Mapping[str, TensorSpec], given: Mapping[str, NDArray[Any]]) -> None:
    """Raises ``InputMismatch`` unless ``given`` are exactly the ``declared`` inputs, in shape and element type."""
    if given.keys() != declared.keys():
        missing, extra = sorted(declared.keys() - given.keys()), sorted(given.keys() - declared.keys())
        raise InputMismatch(
            f"{function}: inputs: expected exactly the declared ones, found missing {missing}, undeclared {extra}",
            function=function,
        )
    for name, spec in declared.items():
        array = given[name]
        if array.shape != spec.shape or array.dtype != spec.numpy:
            raise InputMismatch(
                f"{function}: input {name}: expected {spec}, found {array.dtype}{list(array.shape)}",
                function=function,
                input=name,
            )


class LoadLedger:
    """Loads in the order they happened, and which further ones are allowed (at first: all)."""

    def __init__(self) -> None:
        self._loaded: list[Loaded] = []
        self._allowed: frozenset[tuple[str, str | None]] | None = None

    @property
    def loaded(self) -> tuple[Loaded, ...]:
        """Everything loaded so far, oldest first."""
        return tuple(self._loaded)

    def names(self) -> list[str]:
        """``["chunk_0.mlpackage:decode", …]`` in load order."""
        return [entry.name for entry in self._loaded]

    def seconds(self) -> dict[str, float]:
        """What each load took, by name, in load order: what first use cost apart from running."""
        return {entry.name: entry.seconds for entry in self._loaded}

    def restrict(self, allowed: Iterable[tuple[str, str | None]]) -> None:
        """From now on only ``allowed`` (package, function) pairs may be loaded. A later call replaces the set.

        What is already loaded stays loaded and stays in the ledger.
        """
        self._allowed = frozenset(allowed)

    def check(self, package: str, function: str | None) -> None:
        """Raises ``FunctionNotAllowed`` when this load is outside the allowed set. Engines call it first."""
        if self._allowed is None or (package, function) in self._allowed:
            return
        allowed = ", ".join(sorted(called(*pair) for pair in self._allowed))
        name = called(package, function)
        raise FunctionNotAllowed(
            f"function {name}: opened decode-only: expected one of {allowed}, found {name}; "
            "open the session without decode-only to load it",
            function=name,
            allowed=allowed,
        )

    def record(self, package: str, function: str | None, seconds: float) -> None:
        """Adds a load that has just succeeded."""
        self._loaded.append(Loaded(package, function, seconds))


class Function(Protocol):
    """One loaded function of a package."""

    @property
    def name(self) -> str:
        """The function's own name in its package."""
        ...

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """Declared inputs. A call supplies exactly these."""
        ...

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """Declared outputs, in the program's order."""
        ...

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Runs once. Outputs are of the declared types (fp16, int32), new arrays that the caller owns.

        ``kv_rows=(a, b)``: outputs called k_*_out or v_*_out that hold the whole context, [1, CTX, D], come back
        as rows a to b only, [1, b−a, D]. Inputs are read during the call and never written to; what is kept of them
        afterwards is at most the memory of the host's cache, which the engine then holds a reference to. Raises
        ``InputMismatch``, ``Fp16Overflow``.
        """
        ...


class Engine(Protocol):
    """Loads and runs the functions of one bundle's packages."""

    @property
    def ledger(self) -> LoadLedger:
        """What this engine has loaded."""
        ...

    def function(self, package: str, function: str | None) -> Function:
        """The function, loaded and recorded at first use, the same object afterwards.

        ``function`` ``None`` is the package's default (heads are packages of one function). Raises
        ``FunctionNotAllowed`` before anything is read, and what reading the package raises.
        """
        ...

    def describe(self) -> dict[str, str]:
        """Stable facts about who computes: engine, versions, compute or compute units, BLAS, core type, threads, OS, machine."""
        ...
