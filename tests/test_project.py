"""The project's shape: who imports whom, what a short command loads, what the wheel ships, what the pins cover."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvstore import Group, Identity, Layout, Lineage, Store

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvstore", "runtime", "sync")
CODE = (*PACKAGES, "benchmarks", "examples")
FOLDERS = (*CODE, "tests", "docs", ".ci", ".github")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

ARROWS = {"kvstore": {"kvstore"}, "runtime": {"runtime", "kvstore"}, "sync": {"sync", "kvstore"}}
"""Which of our packages each package may import."""

COMPOSER = "kvstore.__main__"
"""The one module that may import all of them."""

HEAVY = {"numpy", "zstandard", "rich", "cryptography", "coremltools", "runtime", "sync"}
"""What a command that only reads the store never loads."""


def module_name(path: Path) -> str:
    """``kvstore/store.py`` is ``kvstore.store``; a package's own file is named like the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}
ORDERED = sorted({m.rpartition(".")[0] for m in MODULES} & MODULES.keys())
"""Every package, outer and inner."""


def imports(module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a module, wherever it stands, also ``import_module("...")``."""
    package = module if MODULES[module].stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*outer, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in MODULES else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def order(package: str) -> list[str] | None:
    """The order that a package's docstring declares, first to last: ``Order: a · b · c`` up to a full stop or blank line."""
    text = ast.get_docstring(TREES[package]) or ""
    found = re.search(
        r"^(?:Order[^:\n]*|Files in order):\s(.+?)(?:\.(?=\s|$)|\n\s*\n|\Z)", text, re.DOTALL | re.MULTILINE
    )
    if found is None:
        return None
    names = re.split(r"[·,\s]+", found[1].replace("`", ""))
    return [re.sub(r"(/\*?|\.py)$", "", name) for name in names if name]


def members(package: str) -> set[str]:
    """The files and inner packages that stand directly in a package; ``__main__`` is below all of them."""
    prefix = package + "."
    return {m[len(prefix) :].partition(".")[0] for m in MODULES if m.startswith(prefix)} - {"__main__"}


def test_every_import_follows_the_arrows() -> None:
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}"
        for module in MODULES
        if module != COMPOSER
        for line, name in imports(module)
        if (top := name.partition(".")[0]) in PACKAGES and top not in ARROWS[module.partition(".")[0]]
    ]
    assert not wrong, "sync -> kvstore <- runtime"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_declares_its_order(package: str) -> None:
    if not members(package):
        return
    if order(package) is None and os.environ.get("CI") != "true":
        pytest.skip(f"{package}/__init__.py has no line 'Order: a · b · c' yet")
    assert order(package) is not None, f"{package}/__init__.py: expected a docstring line 'Order: a · b · c'"


@pytest.mark.parametrize("package", [p for p in ORDERED if order(p) is not None])
def test_a_file_imports_only_files_above_it(package: str) -> None:
    declared = order(package)
    assert declared is not None
    assert len(declared) == len(set(declared))
    assert set(declared) == members(package), "the declared order and the files of the package"
    rank = {name: i for i, name in enumerate(declared)}
    wrong = []
    for module in MODULES:
        if not module.startswith(package + "."):
            continue
        own = module[len(package) + 1 :].partition(".")[0]
        if own == "__main__":
            continue
        for line, name in imports(module):
            if name == package:  # the package's own names come from files below this one
                wrong.append(f"{MODULES[module].relative_to(ROOT)}:{line} imports {package} itself")
            elif name.startswith(package + "."):
                other = name[len(package) + 1 :].partition(".")[0]
                if other != own and rank.get(other, len(rank)) > rank[own]:
                    wrong.append(
                        f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}, which stands below {own}"
                    )
    assert not wrong


class OneLayer:
    """One layer's K and V in a bytearray: the host memory of the smallest model."""

    def __init__(self, tokens: int, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.k, self.v = bytearray(tokens * row_bytes), bytearray(tokens * row_bytes)

    def spans(self, group: int, start: int, stop: int) -> list[memoryview]:
        assert group == 0
        return [memoryview(a)[start * self.row_bytes : stop * self.row_bytes] for a in (self.k, self.v)]


def test_ls_loads_nothing_heavy(tmp_path: Path) -> None:
    layout = Layout((Group("full", None, (0,), 1, 4),))
    identity = Identity.of({"weights": b"w" * 32, "tokenizer": b"t" * 32})
    with Store.open(tmp_path / "store") as store:
        lineage = [Lineage.of({"engine": "test"})]
        store.save(layout, identity, [1, 2, 3], OneLayer(3, 8), namespace="default", name="book", lineage=lineage)
    program = (
        "import json, sys\n"
        "from kvstore.__main__ import main\n"
        f"sys.argv = ['kvferry', '--store', {str(tmp_path / 'store')!r}, 'ls']\n"
        "try:\n    main()\n"
        "finally:\n    print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})), file=sys.stderr)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "book" in run.stdout
    loaded = set(json.loads(run.stderr.splitlines()[-1]))
    assert "kvstore" in loaded
    assert not loaded & HEAVY


def shipped() -> list[Path]:
    """Every text file of the project, without caches and what a checkout collects."""
    inside = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if "__pycache__" not in p.parts]
    return [p for p in [*sorted(ROOT.iterdir()), *inside] if p.is_file()]


def test_no_file_names_the_place_it_was_written_in() -> None:
    # put together here, so that this file has neither in it
    forbidden = re.compile(rb"\.\./" + rb"shared|(?<![\w}$.-])/" + rb"work/")
    files = shipped()
    assert {"pyproject.toml", "store.py", "ci.yml"} <= {p.name for p in files}
    assert not [str(p.relative_to(ROOT)) for p in files if forbidden.search(p.read_bytes())]


def test_every_module_has_a_docstring() -> None:
    files = [p for folder in CODE for p in sorted((ROOT / folder).rglob("*.py"))]
    assert not [str(p.relative_to(ROOT)) for p in files if not ast.get_docstring(ast.parse(p.read_text()))]


def test_no_file_has_over_600_lines() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in shipped() if p.suffix == ".py"}
    assert not {name: lines for name, lines in lengths.items() if lines > 600}


def test_the_wheel_ships_exactly_our_packages() -> None:
    build = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(build["packages"]) == sorted(PACKAGES)
    assert build.keys() == {"packages"}, "an include or exclude would change what is shipped"
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
        assert (ROOT / package / "__init__.py").is_file()


def test_the_command_exists() -> None:
    module, _, function = PROJECT["project"]["scripts"]["kvferry"].partition(":")
    assert module == COMPOSER
    assert function in {node.name for node in TREES[module].body if isinstance(node, ast.FunctionDef)}


def requirements() -> list[Requirement]:
    lists = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    return [r for r in (Requirement(line) for items in lists for line in items) if r.name != "kvferry"]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    exact: dict[str, str] = {}
    for line in lines:
        pin = Requirement(line)
        assert [s.operator for s in pin.specifier] == ["=="], f"constraints.txt: {line} is not an exact pin"
        exact[canonicalize_name(pin.name)] = next(iter(pin.specifier)).version
    assert len(exact) == len(lines), "a distribution is pinned twice"
    return exact


def test_every_requirement_is_pinned_inside_its_range() -> None:
    exact = pins()
    for requirement in requirements():
        version = exact.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt has no pin for {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement.name} {version} is outside {requirement}"


def test_torch_comes_only_with_an_extra_of_its_own() -> None:
    """3 GB: no other extra asks for it, or for that extra."""
    asking = {
        extra
        for extra, lines in PROJECT["project"]["optional-dependencies"].items()
        if any(r.name == "torch" or "transformers" in r.extras for r in map(Requirement, lines))
    }
    assert asking == {"transformers"}


def test_the_library_sets_no_upper_bounds() -> None:
    bounds = {s.operator for line in PROJECT["project"]["dependencies"] for s in Requirement(line).specifier}
    assert bounds == {">="}
