"""Writes docs/cli.md from the commands themselves: ``python tests/docs/make_cli_reference.py > docs/cli.md``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import click
from json_keys import JSON_KEYS

from kvstore import errors
from kvstore.__main__ import app
from runtime.bench import SpeculationDiffers
from runtime.cli import ReceiptMismatch
from runtime.engine import EngineUnavailable, FunctionNotAllowed, InputMismatch
from runtime.gate_command import GateFailed
from runtime.opening import model_options
from runtime.ops import OperationUnsupported
from sync.connection import FingerprintMismatch, NotUnderstood, TooMany
from sync.onefile import FileCorrupt
from sync.tokens import NotAllowed, TokenRefused

ENVIRONMENT = {
    "KVFERRY_STORE": "the store's folder, where --store is not given. Default: `kvferry/store` in the user's data folder",
    "KVFERRY_CACHE": "bundles, compiled packages and digests that can be made again. Default: `kvferry` in the user's cache folder",
    "KVFERRY_CONFIG": "the servers and keys that this machine knows, and what its own server needs. Default: `kvferry` in the user's settings folder",
    "KVFERRY_TOKEN": "a token for servers by plain HTTP; those that this machine was paired with have theirs. Default: none",
    "KVFERRY_METRICS": "where --metrics is not given: the file that the verbs which take it append to, and that `stats metrics` reads. Default: none",
    "CORELLM_VERIFY_HEAD_CU": "compute units of the batched heads, where --verify-head-units is not given: cpu, gpu, ane or all",
}

EXIT_CODES = {
    0: "done",
    1: "anything else",
    2: "usage: the command line says something that no verb understands",
    3: "missing: not here, nothing is damaged",
    4: "corrupt: bytes that are not what their name says",
    5: "another model's KV",
    6: "another format: written by a newer kvferry",
    7: "refused: the rules do not allow it",
    8: "unreachable: nothing is known about what is there",
    9: "a continuation that differs: from the producer's, or from another that `gate` or `bench` compares it with",
    10: "the store is full: its quota leaves no room, whatever is evicted",
    11: "repaired with losses: `check --repair` has left nothing damaged, and some name lost something",
    130: "interrupted; what was saved is kept",
}

OTHERS = (
    InputMismatch, EngineUnavailable, FunctionNotAllowed, OperationUnsupported, ReceiptMismatch, GateFailed, SpeculationDiffers,
    FileCorrupt, TokenRefused, NotAllowed, FingerprintMismatch, TooMany, NotUnderstood,
)  # fmt: skip
"""Of engines, of commands that compare, and of the wire; bundles and packages have more."""

HEAD = """\
# The command line

<!-- Made by tests/docs/make_cli_reference.py. Change that, or the command's own help. -->

A command prints its answer to stdout and everything else to stderr. `--store DIR` and `--json` may stand before the verb or
behind it; every verb but `completion` takes them.

With `--json` the answer is one JSON value, and each error is a line of stderr that is one JSON object: `error` (its class, in the
table below; `UsageError` for a command line that can't be read, `Interrupted` for Ctrl-C), `message` (what was expected, what was
found and what to do next) and `details` (the same as values). Without it an error is one line, `kvferry: CLASS: MESSAGE`; other lines of
stderr that begin with `kvferry:` are notes. The keys below are an interface: more may come, so ignore those that you don't know. Everywhere a size is in
bytes, a time in seconds, a length or position in tokens, and a digest 64 hex digits. In a key, `a.b` is `b` in the object `a`,
`a[].b` is `b` in each object of the list `a`, and `a.*` are keys that are data.
"""


def verbs(group: click.Group = app, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by what one types for it."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from verbs(command, f"{before}{name} ")
        else:
            yield before + name, command


def reference() -> str:
    """The text of docs/cli.md."""
    parts = [HEAD, "## Environment\n", _table(("variable", "what"), {f"`{k}`": v for k, v in ENVIRONMENT.items()})]
    parts += ["## Exit codes\n", _exit_codes(), "## Options of every verb that runs a model\n", _options(_MODEL)]
    for name, command in verbs():
        own = [p for p in command.params if isinstance(p, click.Option) and p.name not in _COMMON]
        shared = [p for p in own if p.name in {m.name for m in _MODEL}]
        arguments = [_argument(p) for p in command.params if isinstance(p, click.Argument)]
        usage = " ".join(["kvferry", name, *(["[OPTIONS]"] if own else []), *arguments])
        parts += [f"## `kvferry {name}`\n", f"`{usage}`\n", _explained(command.help or "") + "\n"]
        if len(own) > len(shared):
            parts.append(_options([p for p in own if p not in shared]))
        if shared:
            parts.append("Also the options of every verb that runs a model.\n")
        if name in JSON_KEYS:
            parts.append(_table(("JSON key", "what"), {f"`{k}`": v for k, v in JSON_KEYS[name].items()}))
    return "\n".join(parts)


def _explained(text: str) -> str:
    """A command's help; what click must not fill (it stands below a ``\\b``) is a block."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    blocks = (inspect.cleandoc(p.removeprefix("\b\n")) if p.startswith("\b\n") else None for p in paragraphs)
    return "\n\n".join(p if b is None else f"```text\n{b}\n```" for p, b in zip(paragraphs, blocks, strict=True))


def _table(header: tuple[str, ...], rows: Mapping[str, str]) -> str:
    lines = [header, tuple("---" for _ in header), *rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _exit_codes() -> str:
    kinds = [k for k in vars(errors).values() if inspect.isclass(k) and issubclass(k, errors.KVError)]
    rows = {}
    for code, words in EXIT_CODES.items():
        names = [f"`{k.__name__}`" for k in [*kinds, *OTHERS] if k.exit_code == code]
        rows[str(code)] = f"{words} | {', '.join(names)}"
    told = "Bundles, builds and packages have error classes of their own, with the same codes.\n"
    return _table(("code", "what", "errors"), rows) + "\n" + told


def _options(options: list[click.Option]) -> str:
    return _table(("option", "what"), {_names(p): _words(p) for p in options})


def _names(option: click.Option) -> str:
    kind = r"\|".join(option.type.choices) if isinstance(option.type, click.Choice) else option.type.name.upper()
    kind = "N" if option.type.name in ("integer", "integer range", "float range") else kind
    return f"`{', '.join(option.opts)}{'' if option.is_flag else f' {option.metavar or kind}'}`"


def _words(option: click.Option) -> str:
    more = ["required"] if option.required else []
    if isinstance(option.type, click.IntRange) and option.type.max is not None:
        more.append(f"{option.type.min} to {option.type.max}")
    if option.show_default:
        more.append(f"default: {option.default}")
    return " ".join(filter(None, [option.help, f"({'; '.join(more)})" if more else ""]))


def _argument(argument: click.Argument) -> str:
    return argument.metavar or (argument.name or "").upper()


@model_options
@click.command()
def _nothing() -> None:
    """Has the options of a model and no others."""


_MODEL = [p for p in reversed(_nothing.params) if isinstance(p, click.Option)]
_COMMON = {"store_", "json_"}

if __name__ == "__main__":
    print(reference(), end="")
