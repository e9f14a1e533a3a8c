"""What every verb has in common: options before and after it, -h, one form of errors; and command lines that make no sense."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command import Kvferry

from kvstore.__main__ import app

CODE = "import sys; from kvstore.__main__ import main; main()"


def verbs(group: click.Group = app, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from verbs(command, (*before, name))
        else:
            yield (*before, name)


VERBS = list(verbs())


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_explains_itself(kvferry: Kvferry, verb: tuple[str, ...]) -> None:
    answer = kvferry(*verb, "-h")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == kvferry(*verb, "--help").out
    assert answer.out.startswith(f"Usage: kvferry {' '.join(verb)}")


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_says_one_line_about_a_wrong_option(kvferry: Kvferry, verb: tuple[str, ...]) -> None:
    answer = kvferry(*verb, "--nonsense")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("kvferry: UsageError: No such option '--nonsense'")
    assert answer.err.endswith(f"See `kvferry {' '.join(verb)} --help`.\n")
    assert answer.err.count("\n") == 1
    for words in (("--json", *verb, "--nonsense"), (*verb, "--nonsense", "--json")):
        answer = kvferry(*words)
        assert (answer.code, answer.out, json.loads(answer.err)["error"]) == (2, "", "UsageError")


@pytest.mark.parametrize("verb", [v for v in VERBS if v != ("completion",)], ids=" ".join)
def test_every_verb_takes_store_and_json_on_both_sides(kvferry: Kvferry, verb: tuple[str, ...]) -> None:
    """None complains about them: what is wrong is what comes after."""
    for words in (("--store", "s", "--json", *verb, "--nonsense"), (*verb, "--store", "s", "--json", "--nonsense")):
        assert "No such option '--nonsense'" in json.loads(kvferry(*words).err)["message"]


@pytest.mark.parametrize("words", [(), ("bundle",)])
def test_without_a_verb_there_is_help_and_exit_2(kvferry: Kvferry, words: tuple[str, ...]) -> None:
    answer = kvferry(*words)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("Usage: kvferry")
    assert json.loads(kvferry("--json", *words).err)["error"] == "UsageError"


TEXT = ("book.txt", "--bundle", "tiny")
SENSELESS: list[tuple[int, str, tuple[str, ...]]] = [
    (2, "The prompt is empty", ("generate", "--bundle", "tiny", "--prompt", "")),
    (2, "--from NAME, --prompt TEXT or both", ("generate", "--bundle", "tiny")),
    (2, "needs --from NAME", ("generate", "--bundle", "tiny", "--prompt", "x", "--at", "1")),
    (2, "--no-reuse is for a prompt alone", ("generate", "--bundle", "tiny", "--from", "a", "--no-reuse")),
    (2, "-1 is not in the range", ("generate", "--bundle", "tiny", "--prompt", "x", "-n", "-1")),
    (2, "0 is not in the range", ("generate", "--bundle", "tiny", "--from", "a", "--at", "0")),
    (2, "expected some text, found an empty string", ("generate", "--bundle", "", "--prompt", "x")),
    (2, "expected some text, found an empty string", ("generate", "--bundle", "tiny", "--namespace", "", "--prompt", "x")),
    (7, "name ''", ("generate", "--bundle", "tiny", "--prompt", "x", "--save", "")),
    (7, "name ''", ("generate", "--bundle", "tiny", "--from", "")),
    (7, "name ''", ("prefill", *TEXT, "--name", "")),
    (7, "name ' a'", ("prefill", *TEXT, "--name", " a")),
    (2, "0 is not in the range", ("prefill", *TEXT, "--name", "a", "--tokens", "0")),
    (2, "-5 is not in the range", ("prefill", *TEXT, "--name", "a", "--tokens", "-5")),
    (2, "99999 is not in the range", ("prefill", *TEXT, "--name", "a", "--receipt", "99999")),
    (2, "0 is not in the range", ("prefill", *TEXT, "--name", "a", "--threads", "0")),
    (7, "expected at most 2,047", ("prefill", *TEXT, "--name", "a", "--tokens", "99999999999999999999")),
    (7, "which book.txt has, found 9,999", ("find", *TEXT, "--tokens", "9999")),
    (2, "does not exist", ("prefill", "", "--bundle", "tiny", "--name", "a")),
    (7, "name ''", ("show", "")),
    (7, "name ''", ("rename", "", "b")),
    (7, "name ''", ("rename", "a", "")),
    (7, "name ''", ("push", "remote", "")),
    (2, "found an empty string", ("push", "", "a")),
    (2, "found an empty string", ("pull", "", "a")),
    (7, "name ''", ("pull", "remote", "a", "--as", "")),
    (2, "expected a path, found an empty string", ("ls", "--store", "")),
    (2, "expected a path, found an empty string", ("--store", "", "ls")),
    (2, "expected a path, found an empty string", ("demo", "--keep", "")),
    (2, "found an empty string", ("demo", "--model", "")),
    (2, "-1.0 is not in the range", ("gc", "--keep-days", "-1")),
    (2, "nan is not a number", ("gc", "--keep-days", "nan")),
    (2, "Give NAME [DIR]", ("bundle", "build")),
    (2, "Give NAME [DIR]", ("bundle", "build", "tiny", "a", "b")),
    (2, "found an empty string", ("bundle", "build", "tiny", "")),
    (2, "name two models", ("bundle", "build", "tiny", "out", "--from", "book.txt")),
    (2, "has weights of its own", ("bundle", "build", "gemma3-270m", "--seed", "3")),
    (2, "has weights of its own", ("bundle", "build", "mine", "out", "--seed", "3", "--from", "book.txt")),
    (2, "found an empty string", ("bundle", "show", "")),
    (2, "found an empty string", ("export", "a", "", "--as", "corellm")),
    (2, "found an empty string", ("export", "a", "out", "--as", "corellm", "--bundle", "")),
    (2, "found an empty string", ("import", "", "--bundle", "tiny")),
    (2, "found an empty string", ("import", "out", "--bundle", "tiny", "--namespace", "")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "told", "words"), SENSELESS, ids=lambda v: " ".join(v) if isinstance(v, tuple) else None
)
def test_what_makes_no_sense_is_refused_before_any_work(
    kvferry: Kvferry, story: Path, tmp_path: Path, code: int, told: str, words: tuple[str, ...]
) -> None:
    story.rename(tmp_path / "book.txt")
    before = sorted(tmp_path.iterdir())
    answer = kvferry(*words)
    assert (answer.code, answer.out) == (code, ""), answer.err
    assert told in answer.err
    assert answer.err.startswith("kvferry: ")
    assert answer.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before, "no store, no folder, no bundle"


def test_generating_nothing_prints_nothing(kvferry: Kvferry) -> None:
    answer = kvferry("generate", "--bundle", "tiny", "--prompt", "x", "-n", "0", "--save", "a")
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert [row["name"] for row in kvferry("ls", "--json").json] == ["a"]


def test_more_than_fits_is_generated_as_far_as_it_fits(kvferry: Kvferry, story: Path) -> None:
    kvferry("prefill", "--bundle", "tiny", str(story), "--tokens", "2030", "--name", "a", "--receipt", "0")
    answer = kvferry("generate", "--bundle", "tiny", "--from", "a", "-n", "999999999")
    assert answer.code == 0
    assert answer.out.endswith("\n") and "[" not in answer.out[-20:]
    assert answer.err == "kvferry: stopped after 10 of 999,999,999 tokens: the context is full.\n"


def environment(tmp_path: Path, tiny_bundle: Path) -> dict[str, str]:
    cache = tmp_path / "cache" / "bundles"
    cache.mkdir(parents=True)
    (cache / "tiny").symlink_to(tiny_bundle, target_is_directory=True)
    return os.environ | {
        "KVFERRY_STORE": str(tmp_path / "store"), "KVFERRY_CACHE": str(cache.parent), "TMPDIR": str(tmp_path / "tmp"),
    }  # fmt: skip


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", CODE, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert done.stderr == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_command_says_so_once(tmp_path: Path, tiny_bundle: Path, as_json: bool) -> None:
    """It waits for a text on stdin when Ctrl-C comes."""
    words = ["prefill", "-", "--bundle", "tiny", "--name", "a", *(["--json"] if as_json else [])]
    os.mkfifo(tmp_path / "opened")
    code = f"import sys; open({str(tmp_path / 'opened')!r}, 'w').close(); {CODE}"
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(tmp_path, tiny_bundle),
    )  # fmt: skip
    (tmp_path / "opened").read_text()
    wait_until_idle(child.pid)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    assert child.returncode == 130
    (line,) = err.split("\n")[-2:-1]
    assert err.strip() == line
    assert (json.loads(line)["error"] == "Interrupted") if as_json else line.startswith("kvferry: Interrupted: ")


def wait_until_idle(pid: int) -> None:
    """Until the process sleeps with its engine loaded: nothing is left for it but to read."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    last = -1
    while True:
        time.sleep(0.3)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = int(fields[11]) + int(fields[12])
        if fields[0] == "S" and used == last:
            return
        last = used


def test_the_demo_leaves_nothing_when_it_is_ended(tmp_path: Path, tiny_bundle: Path) -> None:
    env = environment(tmp_path, tiny_bundle)
    (tmp_path / "tmp").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", CODE, "demo", "--model", "tiny"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=env,
    )  # fmt: skip
    assert child.stderr is not None
    assert child.stderr.readline().startswith("In ")
    child.stderr.readline()
    assert [p.name for p in (tmp_path / "tmp").glob("kvferry-demo-*")]
    child.terminate()
    child.communicate()
    assert child.returncode == 128 + signal.SIGTERM
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_demo_step_that_fails_is_named_and_gives_its_exit_code(
    tmp_path: Path, tiny_bundle: Path, kvferry: Kvferry
) -> None:
    (tmp_path / "cache" / "bundles" / "broken").mkdir()
    (tmp_path / "cache" / "bundles" / "broken" / "manifest.json").write_text("{}")
    inner = kvferry("bundle", "show", "broken")
    answer = kvferry("demo", "--model", "broken")
    assert answer.code == inner.code != 0
    line = answer.err.splitlines()[-1]
    assert line.startswith("kvferry: StepFailed: step 1 of 6 (Producer: prefill")
    assert "`kvferry --store producer prefill --bundle broken --engine portable ferry.txt" in line
    assert inner.err.removeprefix("kvferry: ").strip() in line
    assert not answer.err.count("{"), "no JSON for people"


def on_a_terminal(*words: str, env: dict[str, str]) -> str:
    """What a command prints on a terminal of 80 columns."""
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", CODE, *words], stdin=follower, stdout=follower, stderr=follower, env=env
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            piece = os.read(leader, 1 << 16)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    child.wait()
    os.close(leader)
    return seen.decode()


def test_a_terminal_of_80_columns_is_not_overrun_and_has_no_colour(
    kvferry: Kvferry, story: Path, tmp_path: Path
) -> None:
    env = os.environ | {"NO_COLOR": "1", "TERM": "xterm-256color"}
    name = "a very long name that somebody gave to a snapshot of a book"
    kvferry("prefill", "--bundle", "tiny", str(story), "--tokens", "70", "--name", name, "--receipt", "0")
    for words in (("ls",), ("du",), ("show", name), ("bundle", "show", "tiny")):
        said = on_a_terminal(*words, env=env)
        assert "\x1b[3" not in said and "\x1b[1m" not in said
        # a path and a digest have no place to be broken at
        assert max(len(line) for line in said.splitlines() if "/" not in line and "snapshot  " not in line) <= 80
    assert name in kvferry("ls").out, "a pipe gets all of it"


def test_the_shell_completes_names(kvferry: Kvferry, story: Path) -> None:
    for name in ("book", "boat", "car"):
        kvferry("prefill", "--bundle", "tiny", str(story), "--tokens", "5", "--name", name, "--receipt", "0")

    def completed(*words: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            env=os.environ | {"_KVFERRY_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(["kvferry", *words]),
                              "COMP_CWORD": str(len(words))},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stderr == ""
        return [line.partition(",")[2] for line in done.stdout.split()]

    assert completed("sh") == ["show"]
    assert completed("show", "bo") == ["boat", "book"]
    assert completed("rm", "book", "c") == ["car"]
    assert completed("generate", "--from", "bo") == ["boat", "book"]
    assert completed("push", "remote", "boo") == ["book"]
    assert completed("generate", "--bundle", "ti") == ["tiny"]
    assert completed("--store", "nowhere", "show", "bo") == []
