"""Commands are thin: they call public names of `sipp`, and show and write its results."""

import ast
from pathlib import Path

import sipp

CLI = Path(sipp.__file__).parent / "cli"
# beside public names: results and what every room may use; networks and data sets by name are the laboratory's; the
# page of several folders is one of runs as well
ALLOWED = (
    "sipp",
    "sipp.results",
    "sipp.errors",
    "sipp.progress",
    "sipp.extras",
    "sipp.files",
    "sipp.report",
)
INSIDE = ("sipp.cli", "sipp_lab")

OF_RUNS = {
    "study_command.py",
    "run_command.py",
    "runs_command.py",
    "recipes_command.py",
    "run_work.py",
    "run_display.py",
}


def imported(path: Path) -> set[str]:
    """The modules of this project that a file imports, also inside of functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("sipp", "sipp_lab")}


def used_of_sipp(path: Path) -> set[str]:
    """The names that a file takes from the package itself: `sipp.NAME`."""
    attributes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "sipp"}


def test_commands_import_public_names_only() -> None:
    files = [path for path in sorted(CLI.rglob("*.py")) if path.name not in OF_RUNS]
    assert len(files) > 20
    for path in files:
        inner = {name for name in imported(path) if name not in ALLOWED and not name.startswith(INSIDE)}
        assert not inner, f"{path.name} imports {inner}"
        assert used_of_sipp(path) <= {*sipp.__all__, "__version__", "errors"}, path.name
    assert "prune" in used_of_sipp(CLI / "commands/prune_command.py")


def test_a_command_is_one_file() -> None:
    assert all(path.name.endswith("_command.py") for path in (CLI / "commands").glob("[a-z]*.py"))
