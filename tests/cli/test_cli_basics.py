"""The command line as a whole: version, help, usage, --json, --debug, signals, and the words of an error."""

import json
import math
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from commandline import run, three_lines

import sipp
from sipp.cli import errors
from sipp.cli.commands import demo_command
from sipp.cli.main import COMMANDS
from sipp.errors import DataError, OptionError, SippError
from sipp.results.jsonio import to_json
from sipp_lab.runs import running as train_run


@pytest.fixture
def points(tmp_path: Path) -> Path:
    np.savez(tmp_path / "points.npz", inputs=np.random.default_rng(0).normal(size=(40, 6)))
    return tmp_path / "points.npz"


def test_version_as_installed_without_optional_packages() -> None:
    script = Path(sys.executable).parent / "sipp"
    code = (
        f"import runpy, sys; sys.argv = ['sipp', '--version']\ntry: runpy.run_path({str(script)!r}, None, '__main__')"
    )
    code += "\nfinally: print(sorted({'transformers', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [f"sipp {sipp.__version__}", "[]"]


def test_help_tells_the_exit_codes_and_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert all(f"{code} " in text.partition("Exit codes:")[2] for code in (0, 1, 2, 3, 130, 143))
    for command in COMMANDS:
        assert f" {command} " in text
        assert "--json" in run(command, "--help").stdout


def test_no_words_give_the_help_once() -> None:
    done = run()
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("Usage:") == 1


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
    assert done.returncode == 2 and done.stdout == ""
    assert expected in three_lines(done.stderr)[0]


def test_a_bug_is_exit_1_and_shows_its_traceback_only_with_debug(points: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(sipp, "compare", broken)
    words = ["compare", "--model", "cli_zoo:mlp", "--data", points]
    done = run(*words)
    what, where, fix = three_lines(done.stderr)
    assert (
        done.returncode == 1 and "KeyError" in what and "cli/commands/compare_command.py:" in where and "--debug" in fix
    )
    for loud in (run("--debug", *words), run(*words, "--debug")):
        assert loud.returncode == 1 and "Traceback" in loud.stderr


def test_wrong_input_shows_its_traceback_with_debug() -> None:
    done = run("compare", "--model", "resnet21", "--data", "digits", "--debug")
    assert done.returncode == 2 and "Traceback" in done.stderr and "resnet20" in done.stderr


@pytest.mark.parametrize(("model", "code"), [("interrupted", 130), ("terminated", 143)])
def test_signals_have_their_own_exit_codes(points: Path, model: str, code: int, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    out = tmp_path / "out"
    done = run("prune", "--model", f"cli_zoo:{model}", "--data", points, "--keep", 0.5, "--out", out)
    assert done.returncode == code and "stopped by" in done.stderr and not out.exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_json_is_alone_on_stdout_whatever_a_network_prints(points: Path) -> None:
    done = run("compare", "--model", "cli_zoo:talks", "--data", points, "--methods", "magnitude", "--json")
    assert done.returncode == 0 and "talks" in done.stderr
    record = json.loads(done.stdout)
    assert {row["method"] for row in record["rows"]} == {"magnitude"}
    assert "talks" in run("compare", "--model", "cli_zoo:talks", "--data", points, "--methods", "magnitude").stdout


def test_what_is_not_finite_is_text() -> None:
    values = {"a": [math.inf, 1.0, (math.nan,)], "b": {"c": -math.inf}, "d": Path("x")}
    assert to_json(values) == {"a": ["inf", 1.0, ["nan"]], "b": {"c": "-inf"}, "d": "x"}


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (
            DataError("3 values are NaN", where="a.npz", fix="drop it"),
            ("a.npz: 3 values are NaN", "--data x", "drop it"),
        ),
        (DataError("no points; it was cut"), ("no points; it was cut", "--data x", "give another")),
        (
            OptionError("keep=2 is not in (0, 1]", fix="give keep=0.5", option="keep"),
            ("--keep 2 is not in (0, 1]", "--data x", "give --keep 0.5"),
        ),
        (OptionError("epochs=0 is none", option="epochs"), ("epochs=0 is none", "--data x", "give another")),
        (errors.CommandError("lost", where="--out y", fix="look for it"), ("lost", "--out y", "look for it")),
    ],
)
def test_the_fields_of_an_error_become_three_lines(
    error: SippError, lines: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    def app(**options: object) -> None:
        with errors.naming_option("--data x", "give another"):
            raise error

    assert errors.run_and_report(app, ["prune"]) == 2 and three_lines(capsys.readouterr().err) == lines


def test_a_message_is_one_line_of_bounded_length() -> None:
    text = errors.three_lines("a\nb " + "name, " * 1000, "where", "do")
    assert len(text.splitlines()) == 3 and len(text) < 1000


def test_a_hundred_dead_layers_are_one_warning() -> None:
    done = run("prune", "--model", "resnet110", "--keep", 1e-6, "--method", "magnitude", "--dry-run")
    lines = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert (
        done.returncode == 0
        and len(lines) == 2
        and "109 layers lost all their weights" in lines[0]
        and "more" in lines[0]
    )


def test_many_warnings_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    def app(**options: object) -> None:
        for i in range(errors.MOST_WARNINGS + 3):
            warnings.warn(f"number {i % (errors.MOST_WARNINGS + 2)}", stacklevel=1)

    assert errors.run_and_report(app, ["prune"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == errors.MOST_WARNINGS + 1 and lines[0] == "warning: number 0" and "and 2 more" in lines[-1]


def test_runs_and_recipes_as_json(tmp_path: Path) -> None:
    assert json.loads(run("run", "--status", "--out", tmp_path, "--json").stdout) == {"kind": "runs", "runs": []}
    names = [one["name"] for one in json.loads(run("run", "--json").stdout)["recipes"]]
    assert "digits-iterative" in names


def test_a_run_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"seed": 0, "method": "magnitude", "level": 1, "keep": 0.5, "before": None, "after": {"top1": 0.9}}
    record |= {"dead_rows": 0, "loss": math.nan}

    def fake(recipe: object, *, on_progress: object, **options: object) -> train_run.FinishedRun:
        on_progress(train_run.Progress("dense", 1, 2, is_end=True))  # type: ignore[operator]
        return train_run.FinishedRun(tmp_path, [record], 2)

    monkeypatch.setattr("sipp.cli.run_work.run_recipe", fake)
    done = run("run", "digits-at-init", "--json")
    expected = {"kind": "run", "folder": str(tmp_path), "n_made": 2, "records": [{**record, "loss": "nan"}]}
    assert json.loads(done.stdout) == expected and "1 of 2 networks done" in done.stderr


def test_the_demo_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"method": None, "level": 0, "after": {"top1": 0.9}}]
    monkeypatch.setattr(demo_command, "run_demo", lambda folder, force: (records, folder / "page.html"))
    record = json.loads(run("demo", "--out", tmp_path, "--json").stdout)
    assert record["records"] == records and record["page"] == str(tmp_path / "page.html")


def test_data_lists_what_is_here(tmp_path: Path) -> None:
    found = {one["name"]: one["here"] for one in json.loads(run("data", "list", tmp_path, "--json").stdout)["sets"]}
    assert found == {"digits": True, "mnist": False, "cifar10": False, "imagenet": False}
    assert "1,437 training" in run("data").stdout
