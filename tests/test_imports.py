"""Imports point only to the left: the order of the rooms in CONTRIBUTING.md, checked by an AST walk."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "sipp"


def rooms() -> list[list[str]]:
    """The rooms from left to right, as CONTRIBUTING.md lists them; those of one line do not know each other."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"<!-- rooms -->\n```\n(.*?)```", text, re.S)
    assert block is not None
    return [line.split() for line in block.group(1).strip().splitlines()]


def imports(path: Path) -> set[str]:
    """First-level rooms of sipp that a file imports; names imported for type checking only do not count."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sipp":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sipp.")}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return found


def violations(order: list[list[str]], room: str, imported: set[str]) -> set[str]:
    rank = {name: i for i, line in enumerate(order) for name in line}
    return {name for name in imported if name != room and rank.get(name, len(order)) >= rank[room]}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


# the package's own two files stand outside of the order: they are its doors
DOORS = (SOURCE / "__init__.py", SOURCE / "__main__.py")
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path not in DOORS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_the_left(path: Path) -> None:
    order = rooms()
    assert any(room_of(path) in line for line in order), f"{room_of(path)} has no place in CONTRIBUTING.md"
    assert not violations(order, room_of(path), imports(path) - {"__version__"})


def test_a_wrong_import_is_caught() -> None:
    assert violations(rooms(), "budget", {"records", "prune"}) == {"prune"}


def test_no_room_is_listed_that_does_not_exist() -> None:
    existing = {room_of(path) for path in FILES}
    assert {name for line in rooms() for name in line} <= existing
