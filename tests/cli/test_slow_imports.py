"""Slow packages are imported only by commands that need them; each case runs in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sipp
from sipp.cli.main import COMMANDS, function_of

SOURCE = Path(sipp.__file__).parent
SLOW = {"torch", "numba", "scipy"}
LISTS = SLOW | {"matplotlib", "pydantic", "safetensors", "sklearn", "sipp.cli.data_option"}


def loaded(code: str, *words: str) -> set[str]:
    """The modules that are there after this code has run."""
    code += "\nimport sys; print('\\n', *sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("\n"))


CALLS = """
import json, sys
from sipp.cli.errors import run_and_report
from sipp.cli.main import app
for words in json.loads(sys.argv[1]):
    assert run_and_report(app, words) == 0
    print("\\nLOADED", *sys.modules)
"""


def called(*commands: list[str]) -> list[set[str]]:
    """The modules that are there after each of these commands, one after the other in one process."""
    done = subprocess.run([sys.executable, "-c", CALLS, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [set(line.split()) for line in done.stdout.splitlines() if line.startswith("LOADED ")]
    assert len(found) == len(commands)
    return found


def test_the_package_alone_is_light() -> None:
    found = loaded("import sipp; sipp.errors.DataError; dir(sipp)")
    assert "sipp.errors" in found and found & SLOW == set()


def test_the_list_of_commands_needs_no_command() -> None:
    for found in called(["--help"], ["--version"]):
        assert "sipp.cli.main" in found and found & LISTS == set()
        assert not [name for name in found if name.startswith("sipp.cli.commands.")]


def test_the_help_of_a_command_needs_no_torch() -> None:
    for name, found in zip(COMMANDS, called(*([name, "--help"] for name in COMMANDS))):
        assert f"sipp.cli.commands.{name.replace('-', '_')}_command" in found and found & SLOW == set(), name


@pytest.mark.parametrize("name", sipp.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(sipp, name).__name__ == name and name in dir(sipp)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        sipp.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_it_says_itself(name: str) -> None:
    assert (function_of(name).__doc__ or "").splitlines()[0] == COMMANDS[name]


def test_every_file_of_a_command_is_in_the_list() -> None:
    files = {path.stem for path in (SOURCE / "cli" / "commands").glob("*_command.py")}
    assert files == {f"{name.replace('-', '_')}_command" for name in COMMANDS}


def test_the_list_of_methods_needs_no_torch() -> None:
    assert (
        "sipp.scoring.methods" in (found := loaded("from sipp.scoring.methods import NAMES")) and found & SLOW == set()
    )
