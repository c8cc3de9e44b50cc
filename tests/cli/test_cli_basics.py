"""The command line as a whole: version, help, usage, how options are derived, --json, --debug, signals, errors."""

import ast
import json
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from commandline import must_not_be_called, run, three_lines, told
from typer import rich_utils

import sipp
from sipp.cli import errors
from sipp.cli.main import app
from sipp.results import Option, PruneOptions

CLI = Path(errors.__file__).parent


@pytest.fixture
def points(tmp_path: Path) -> Path:
    np.savez(tmp_path / "points.npz", inputs=np.random.default_rng(0).normal(size=(40, 6)))
    return tmp_path / "points.npz"


def test_version_as_installed_without_optional_packages() -> None:
    script = Path(sys.executable).parent / "sipp"
    code = (
        f"import runpy, sys; sys.argv = ['sipp', '--version']\ntry: runpy.run_path({str(script)!r}, None, '__main__')"
    )
    code += "\nfinally: print(sorted({'transformers', 'ray', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [f"sipp {sipp.__version__}", "[]"]


def test_help_tells_the_exit_codes_and_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert all(f"{code} " in text.partition("Exit codes:")[2] for code in (0, 1, 2, 3, 130, 143))
    assert all(f" {command} " in text for command in app.commands)
    nothing = run()
    assert nothing.returncode == 2 and (nothing.stdout + nothing.stderr).count("Usage:") == 1


@pytest.mark.parametrize("name", app.commands)
def test_every_option_has_its_meaning_in_its_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)
    text = run(name, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in text and "--json" in text
    options = [one for one in app.commands[name].params if one.param_type_name == "option"]
    for one in options:
        rest = text[text.index([*one.opts, *one.secondary_opts][0]) :]
        assert one.help and re.search(r".*?".join(map(re.escape, one.help.split())), rest, flags=re.S), one.name
    groups = list(dict.fromkeys(one.rich_help_panel for one in options))
    assert groups == [group for group in Option.GROUPS if group in groups]


# --- how options are derived ------------------------------------------------------------------------------------------


def test_the_options_of_prune_are_the_fields_of_its_record() -> None:
    by_name = {one.name: one for one in app.commands["prune"].params}
    hints = get_type_hints(PruneOptions, include_extras=True)
    for field in fields(PruneOptions):
        words = next((one for one in get_args(hints[field.name])[1:] if isinstance(one, Option)), None)
        if words is None or words.group is None:
            assert field.name not in by_name
        else:
            assert by_name[field.name].rich_help_panel == words.group
            assert by_name[field.name].help.startswith(words.words.split("{")[0])


@pytest.mark.parametrize("room", ["cli", "report"])
def test_commands_and_pages_use_public_names_and_results_only(room: str) -> None:
    """Beside their own, and the files that every room may use; commands also use the laboratory."""
    names = ("results", "errors", "files", "progress", "extras", "doors", room)
    allowed = {*(f"sipp.{name}" for name in names), *(["sipp_lab"] if room == "cli" else [])}
    for path in (CLI.parent / room).rglob("*.py"):
        tree = ast.parse(path.read_text())
        found = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        ours = {name for name in found if name.startswith("sipp")}
        assert not [name for name in ours if not any(f"{name}.".startswith(f"{one}.") for one in allowed)], path.name
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "sipp"}
        assert used <= {*sipp.__all__, "__version__"}, path.name


# --- errors, warnings, signals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nope"], "No such command"),
        (["prune", "--bogus"], "No such option"),
        (["prune", "--keep", "x"], "--keep"),
        (["compare", "--model", "lstm"], "--data"),
        (["data", "svhn"], "cifar10"),
    ],
)
def test_wrong_words_are_three_lines(words: list[str], expected: str) -> None:
    done = run(*words)
    assert done.returncode == 2 and done.stdout == "" and expected in three_lines(done.stderr)[0]


def test_a_bug_is_exit_1_and_shows_its_traceback_only_with_debug(points: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sipp, "compare", must_not_be_called)
    words = ["compare", "--model", "cli_zoo:mlp", "--data", points]
    done = run(*words)
    what, where, fix = three_lines(done.stderr)
    assert done.returncode == 1 and "AssertionError" in what
    assert "cli/commands/compare_command.py:" in where and "--debug" in fix
    for loud in (run("--debug", *words), run(*words, "--debug")):
        assert loud.returncode == 1 and "Traceback" in loud.stderr


@pytest.mark.parametrize(("model", "code"), [("interrupted", 130), ("terminated", 143)])
def test_signals_have_their_own_exit_codes(points: Path, model: str, code: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["prune", "--model", f"cli_zoo:{model}", "--data", points, "--keep", "0.5", "--out", out]
    done = subprocess.run(
        [sys.executable, "-m", "sipp", *words], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    assert done.returncode == code and "stopped by" in done.stderr and not out.exists()


def test_messages_are_bounded_and_a_warning_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = errors.three_lines("a\nb " + "name, " * 1000, "where", "do")
    assert len(text.splitlines()) == 3 and len(text) < 1000

    def app(**options: object) -> None:
        for i in (0, 1, 0):
            warnings.warn(f"number {i}", stacklevel=1)

    assert errors.run_and_report(app, ["prune"]) == 0
    assert capsys.readouterr().err.splitlines() == ["warning: number 0", "warning: number 1"]


def test_json_is_alone_on_stdout_whatever_a_network_prints(points: Path) -> None:
    words = ["compare", "--model", "cli_zoo:talks", "--data", points, "--methods", "magnitude"]
    done = run(*words, "--json")
    assert done.returncode == 0 and "talks" in done.stderr and "talks" in run(*words).stdout
    assert {row["method"] for row in json.loads(done.stdout)["rows"]} == {"magnitude"}


def test_data_lists_what_is_here_and_fetches_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {one["name"]: one["here"] for one in told("data", "list", tmp_path)["sets"]}
    assert found == {"digits": True, "mnist": False, "cifar10": False, "imagenet": False}
    monkeypatch.setattr("sipp_lab.data.published.Published._download", must_not_be_called)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(b"mine")
    done = run("data", "cifar10", tmp_path)
    assert done.returncode == 2 and "move" in three_lines(done.stderr)[2]
