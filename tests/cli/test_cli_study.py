"""`sipp study`: from nothing to a page, resumed, with one more method; `sipp recipes`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import run, three_lines

from sipp_lab.parallel.on_ray import RayOptions
from sipp_lab.studies import study_names

SMALL = (
    "--set=train.epochs=1", "--set=train.decay={factor: 0.5, every: 1}", "--set=train.batch_size=256",
    "--set=prune.keeps=[0.3]", "--set=repetitions=1", "--set=data.n_holdout=0", "--device=cpu",
)  # fmt: skip


def plan(*words: object) -> list[tuple[int, int, int]]:
    """(there, taken over, to train) of each run of the study."""
    done = run("study", *words, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    return [(one["n_there"], one["n_shared"], one["n_new"]) for one in json.loads(done.stdout)["runs"]]


def test_a_study_and_one_more_method(tmp_path: Path) -> None:
    words = ["paper-fully-connected", *SMALL, "--out", tmp_path]
    first = [*words, "--set=prune.methods=[magnitude]"]
    assert plan(*first) == [(0, 0, 2), (0, 1, 1)] and not list(tmp_path.iterdir())  # one dense network for both
    done = run("study", *first, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["n_made"] for one in told["runs"]] == [2, 1] and told["page"].endswith("-short.html")
    page = Path(told["page"]).read_text()
    assert "Study paper-fully-connected (short)" in page and "Main comparison" in page
    assert page.index("Main comparison") < page.index("SiPP prunes fully-connected")  # before what the paper says
    assert plan(*first) == [(2, 0, 0), (2, 0, 0)]
    assert "nothing left to do" in run("study", *first).stdout
    more = [*words, "--set=prune.methods=[sipp-det, magnitude]"]
    assert plan(*more) == [(0, 2, 1), (0, 2, 1)]
    told = json.loads(run("study", *more, "--json").stdout)
    assert [one["n_made"] for one in told["runs"]] == [1, 1]
    assert [[r["method"] for r in one["records"]] for one in told["runs"]] == [[None, "sipp-det", "magnitude"]] * 2


def test_studies_and_recipes_are_listed() -> None:
    assert [one["name"] for one in json.loads(run("study", "--json").stdout)["studies"]] == study_names()
    assert "blend" in run("study").stdout and "digits-iterative" in run("recipes").stdout
    text = run("recipes", "show", "vgg16-cifar10-iterative").stdout
    assert any(line.split()[:2] == ["retrain.epochs", "150"] for line in text.splitlines())
    keys = json.loads(run("recipes", "show", "digits-iterative", "--json").stdout)["keys"]
    assert {"key": "train.epochs", "value": 8, "meaning": "epochs of training"} in keys
    assert "sipp recipes" in three_lines(run("recipes", "show").stderr)[1]


def test_a_study_in_two_processes_gives_the_runs_of_one(tmp_path: Path) -> None:
    words = ["study", "paper-fully-connected", *SMALL, "--set=prune.methods=[magnitude]", "--json"]
    assert run(*words, "--out", tmp_path / "one").returncode == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sipp"]
    done = subprocess.run(
        [*launch, *map(str, words), "--out", str(tmp_path / "two")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # of one process: the other only helps
    assert [one["n_made"] for one in told["runs"]] == [2, 1] and Path(told["page"]).is_file()
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("one", "two")]
    assert names[0] == names[1]


def test_a_study_hands_its_engine_to_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def on_ray(job: Any, options: RayOptions, stop: object) -> Iterator[Any]:
        asked.append((job.recipe.name, options))
        yield from ()

    monkeypatch.setattr("sipp_lab.runs.run_recipe.run_on_ray", on_ray)
    monkeypatch.setattr("sipp_lab.runs.run_recipe.check_ray", lambda options: None)
    words = ["paper-fully-connected", *SMALL, "--out", tmp_path, "--engine", "ray", "--at-once", 3]
    run("study", *words)
    assert asked == [(name, RayOptions("local", 3)) for name in ("digits-fc-iterative", "digits-fc-at-init")]
    done = run("study", "paper-fully-connected", *SMALL, "--out", tmp_path, "--at-once", 3)
    assert done.returncode == 2 and "engine" in done.stderr
