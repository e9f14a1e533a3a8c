"""What the documents point to is there: links, files, names of the code; and the architecture's tables are complete."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from pages import ROOT, code_spans, page_name, pages, prose

PACKAGES = ("kvstore", "runtime", "sync")
FOLDERS = (*PACKAGES, "tests", "docs", "benchmarks", "examples", ".ci", ".github")
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def anchors(page: Path) -> set[str]:
    """How GitHub names the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=page_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists() and goal.is_relative_to(ROOT), f"{page_name(page)}: {target}"
        if anchor:
            assert anchor in anchors(goal), f"{page_name(page)}: {target}"


@pytest.mark.parametrize("page", pages(), ids=page_name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")  # diagrams and commands too
    named = re.findall(rf"(?<![\w./])((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w)", text)
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()]
    assert not missing, page_name(page)


def exists(dotted: str) -> bool:
    """Whether ``kvstore.files.Root.publish`` is a module, or something in one."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not dotted.startswith(error.name or "?"):
                raise
            continue
        for name in parts[end:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("page", pages(), ids=page_name)
def test_every_name_of_the_code_exists(page: Path) -> None:
    dotted = [span.partition("(")[0] for span in code_spans(page)]
    names = [
        name for name in dotted if re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+", name) and not name.endswith(".py")
    ]
    assert not [name for name in names if not exists(name)], page_name(page)


def listed(package: str) -> list[str]:
    """The first column of the table in the architecture's section about a package."""
    section = re.search(rf"^## {package}\n(.*?)(?=^## |\Z)", ARCHITECTURE.read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None
    rows = [line.split("|")[1] for line in section[1].splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_lists_every_module_once(package: str) -> None:
    inside = [path for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    modules = {path.stem for path in inside} - {"__init__", "__main__"}
    assert sorted(listed(package)) == sorted(modules)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_keeps_the_packages_own_order(package: str) -> None:
    """A reader of the table meets a module after those that it uses."""
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))) or ""
    order = [name for name in re.split(r"[·\s]+", text.split("Order:")[1]) if name]
    assert listed(package) == order
