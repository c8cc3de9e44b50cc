"""Imports point only to the left: the one line of rooms in CONTRIBUTING.md, checked by an AST walk."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "sipp"

DOORS = {"__init__.py", "__main__.py"}  # of the package and of the command line: they name what lies behind them
MOST_FILES_BESIDE = 8

FILES = sorted(SOURCE.rglob("*.py"))


def rooms() -> list[str]:
    """The rooms from left to right, as CONTRIBUTING.md lists them."""
    found = re.search(r"<!-- rooms -->\n\n    (.*)\n", (ROOT / "CONTRIBUTING.md").read_text())
    assert found is not None
    return found.group(1).split(" <- ")


def module_of(path: Path) -> str:
    return ".".join(("sipp", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imports(path: Path) -> set[str]:
    """Modules of sipp that a file imports, wherever in it and under whatever condition."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "sipp":
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "sipp"}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_import_is_for_type_checkers_only(path: Path) -> None:
    assert "TYPE_CHECKING" not in path.read_text()


def test_a_guarded_import_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "guarded.py"
    path.write_text(
        "if CHECKING:\n    from sipp.pruning.cutting import cut\ndef late():\n    import sipp.verbs.prune\n"
    )
    assert imports(path) == {"sipp.pruning.cutting", "sipp.verbs.prune"}


def room_of(module: str) -> str:
    """The folder a module lies in; empty for the files beside the folders."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else ""


def violations(order: list[str], room: str, imported: set[str]) -> set[str]:
    """The modules that lie to the right of a room; the files beside the folders are to the left of all."""
    rank = {name: i for i, name in enumerate(["", *order])}
    return {module for module in imported if rank[room_of(module)] > rank[room]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_to_the_left(path: Path) -> None:
    name = path.relative_to(SOURCE).as_posix()
    if name not in DOORS:
        assert not violations(rooms(), room_of(module_of(path)), imports(path))


def test_a_wrong_import_is_caught() -> None:
    order = rooms()
    assert violations(order, "scoring", {"sipp.inputs.capture", "sipp.pruning.cutting"}) == {"sipp.pruning.cutting"}
    assert violations(order, "", {"sipp.inputs.capture"}) == {"sipp.inputs.capture"}


def test_every_folder_is_a_room_and_every_room_a_folder() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(rooms()) == folders and len(rooms()) == len(folders)


def test_no_module_imports_itself_by_a_detour() -> None:
    """At import time: what a function imports when it is called may point anywhere its room may look."""
    graph = {name: at_import(path) & MODULES.keys() for name, path in MODULES.items()}
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                walk(other, (*above, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def at_import(path: Path) -> set[str]:
    """What a file imports at its top level."""
    tree = ast.parse(path.read_text())
    top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    found: set[str] = set()
    for node in ast.walk(top):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_few_files_lie_beside_the_folders() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MOST_FILES_BESIDE
