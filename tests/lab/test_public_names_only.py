"""The laboratory uses `sipp` as a user does: public names, and the doors that are named here."""

import ast
from pathlib import Path

import pytest

import sipp

SOURCE = Path(__file__).parents[2] / "src"
FILES = sorted((SOURCE / "sipp_lab").rglob("*.py"))
# What results, options and errors are, and what pages are made of; nothing that computes.
DOORS = ("sipp.results", "sipp.report", "sipp.errors", "sipp.progress", "sipp.extras", "sipp.files")


def wrong(text: str) -> list[str]:
    """The imports of sipp in this code that are not public."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sipp":
            module, names = str(node.module), {alias.name for alias in node.names}
            is_door = module in DOORS
            if module == "sipp":
                is_door = names <= {*sipp.__all__, "errors"}
            found += [] if is_door and not any(name.startswith("_") for name in names) else [f"{module}: {names}"]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("sipp.")]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sipp":
            found += (
                [] if node.attr in sipp.__all__ or node.attr in ("__version__", "__file__") else [f"sipp.{node.attr}"]
            )
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_public_names_are_used(path: Path) -> None:
    assert wrong(path.read_text()) == []


def test_others_are_caught() -> None:
    for text in (
        "from sipp.pruning.cutting import cut",
        "from sipp.report.plots import lines",
        "import sipp.verbs.prune",
        "from sipp.results.words import listed",
        "from sipp.results import _digits",
        "def late():\n    from sipp.storage import files",
        "import sipp\nsipp.storage.files",
    ):
        assert wrong(text), text


def test_the_library_does_not_know_the_laboratory() -> None:
    """Only its commands do."""
    others = [path for path in (SOURCE / "sipp").rglob("*.py") if "cli" not in path.parts]
    assert [path.name for path in others if "sipp_lab" in path.read_text()] == []
