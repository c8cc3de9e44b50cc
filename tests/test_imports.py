"""Imports point only to the left, and only to the doors of rooms: checked by an AST walk over src.

The order is the one line of rooms in CONTRIBUTING.md. A door is what `sipp.doors` reads in a room's `__init__.py`.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "sipp"

OUTERMOST = {"__init__.py", "__main__.py"}  # of the package and of the command line: they name what lies behind them
MOST_FILES_BESIDE = 8

FILES = sorted(SOURCE.rglob("*.py"))
LABORATORY = sorted((SOURCE.parent / "sipp_lab").rglob("*.py"))  # it uses doors as well
ROOMS = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists())


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def rooms() -> list[str]:
    """The rooms from left to right, as CONTRIBUTING.md lists them."""
    found = re.search(r"<!-- rooms -->\n\n    (.*)\n", CONTRIBUTING)
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
    """But those of a door, which are made when they are asked for."""
    text = path.read_text()
    assert "import TYPE_CHECKING" not in text or "else:\n    __getattr__, __dir__, __all__ = door(" in text


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
    if name not in OUTERMOST:
        assert not violations(rooms(), room_of(module_of(path)), imports(path))


def test_a_wrong_import_is_caught() -> None:
    order = rooms()
    assert violations(order, "scoring", {"sipp.inputs.capture", "sipp.pruning.cutting"}) == {"sipp.pruning.cutting"}
    assert violations(order, "", {"sipp.inputs.capture"}) == {"sipp.inputs.capture"}


def test_every_folder_is_a_room_and_every_room_a_folder() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(rooms()) == folders and len(rooms()) == len(folders)


def test_no_module_imports_itself_by_a_detour() -> None:
    """What a function imports when it is called may point anywhere its room may look; `room.name` counts wherever."""
    graph = {name: at_import(path) & MODULES.keys() for name, path in MODULES.items()}
    assert "sipp.inputs.data" in graph["sipp.scoring.task"]
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                walk(other, (*above, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_a_detour_by_a_door_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "detour.py"
    path.write_text("from sipp import pruning\ndef late():\n    return pruning.cut\n")
    assert "sipp.pruning.cutting" in at_import(path)


def at_import(path: Path) -> set[str]:
    """What a file imports at its top level, and what lies behind the doors it takes a `room.name` from."""
    tree = ast.parse(path.read_text())
    top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    found: set[str] = set()
    for node in ast.walk(top):
        if isinstance(node, ast.ImportFrom) and node.module:
            behind = DOORS.get(node.module.removeprefix("sipp."), {})
            inner = {behind.get(alias.name, f"{node.module}.{alias.name}") for alias in node.names}
            found |= inner & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    whole = {name.removeprefix("sipp.") for name in found} & DOORS.keys()
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return found | {DOORS[node.value.id].get(node.attr, "") for node in used if node.value.id in whole}


# --- doors ----------------------------------------------------------------------------------------------------------


def door_of(path: Path) -> dict[str, str]:
    """The names at the door in this `__init__.py`, each with the module it comes from."""
    guarded = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    imports = [node for one in guarded for node in one.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


DOORS = {room: door_of(SOURCE / room / "__init__.py") for room in ROOMS}


def taken(path: Path, own: str) -> set[tuple[str, str]]:
    """Modules of other rooms and the names that a file takes from them, as imports or as `room.name`."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    found = {(str(node.module), alias.name) for node in imported for alias in node.names}
    whole = {room for module, room in found if module == "sipp" and room in ROOMS}
    used = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    found |= {(f"sipp.{node.value.id}", node.attr) for node in used if node.value.id in whole}
    return {(module, name) for module, name in found if room_of(module) in ROOMS and room_of(module) != own}


TAKEN = {
    path: taken(path, room_of(module_of(path)) if path in FILES else "")
    for path in [*FILES, *LABORATORY]
    if path.parent != SOURCE
}


def past_doors(names: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those names that are taken from elsewhere than a door, or are not at it."""
    return {(module, name) for module, name in names if name not in DOORS.get(module.removeprefix("sipp."), {})}


@pytest.mark.parametrize("path", TAKEN, ids=lambda path: str(path.relative_to(SOURCE.parent)))
def test_nobody_imports_past_a_door(path: Path) -> None:
    assert not past_doors(TAKEN[path])
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
    assert not [alias.name for node in nodes for alias in node.names if alias.name.startswith("sipp.")]


def test_an_import_past_a_door_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "past.py"
    path.write_text("from sipp.inputs import Data, no_such\ndef late():\n    from sipp.inputs.data import Data\n")
    assert past_doors(taken(path, "scoring")) == {("sipp.inputs", "no_such"), ("sipp.inputs.data", "Data")}
    path.write_text("from sipp import inputs\ninputs.Data, inputs.capture, inputs.Data.no_such\n")
    assert past_doors(taken(path, "scoring")) == {("sipp.inputs", "capture")}
    assert taken(path, "inputs") == set()


@pytest.mark.parametrize("room", ROOMS)
def test_each_name_at_a_door_is_used_there_and_is_no_module_by_chance(room: str) -> None:
    """A name that a module of the room has too would be that module, once the module is imported."""
    late = [taken(path, "") for path in (SOURCE / room).glob("*.py")]  # by the room itself
    used = {name for names in [*TAKEN.values(), *late] for module, name in names if module == f"sipp.{room}"}
    assert DOORS[room].keys() - used == set()
    modules = {name for name, module in DOORS[room].items() if f"sipp.{room}.{name}" in MODULES}
    assert {name for name in modules if DOORS[room][name] != f"sipp.{room}"} == set()


def test_as_few_names_cross_as_documented() -> None:
    said = re.search(r"At most (\d+) names are at doors", CONTRIBUTING)
    assert said is not None
    counts = {room: len(names) for room, names in DOORS.items()}
    assert sum(counts.values()) <= int(said.group(1)), counts


def test_few_files_lie_beside_the_folders() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MOST_FILES_BESIDE
