"""`sipp study`: from nothing to a page, resumed; what it and `sipp run` would train, and for how long; recipes."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import run

from sipp_lab.parallel.on_ray import RayOptions
from sipp_lab.studies import study_names

SMALL = (
    "--set=train.epochs=1", "--set=train.decay={factor: 0.5, every: 1}", "--set=train.batch_size=256",
    "--set=prune.keeps=[0.3]", "--set=repetitions=1", "--set=data.n_holdout=0", "--device=cpu",
)  # fmt: skip


def plan(*words: object) -> list[tuple[int, int]]:
    """(there, to train) of each run of the study."""
    done = run("study", *words, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["seconds"] > 0) == (told["n_new"] > 0)
    return [(one["n_there"], one["n_new"]) for one in told["runs"]]


def test_a_study_from_nothing_to_its_page(tmp_path: Path) -> None:
    words = ["paper-fully-connected", *SMALL, "--out", tmp_path, "--set=prune.methods=[magnitude]"]
    assert plan(*words) == [(0, 2), (0, 2)] and not list(tmp_path.iterdir())
    done = run("study", *words, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [one["n_made"] for one in told["runs"]] == [2, 2] and told["page"].endswith("-short.html")
    page = Path(told["page"]).read_text()
    assert "Study paper-fully-connected (short)" in page and "Main comparison" in page
    assert page.index("Main comparison") < page.index("SiPP prunes fully-connected")  # before what the paper says
    assert "reproduces no figure of the paper" in page
    assert plan(*words) == [(2, 0), (2, 0)]
    again = run("study", *words).stdout
    assert "nothing left to do" in again and "reproduces no figure of the paper" in again


def test_a_dry_run_says_how_long(tmp_path: Path) -> None:
    done = run("run", "digits-iterative", *SMALL, "--out", tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert re.search(r"5 networks and 5 epochs to train: about [0-9.]+ s here, one network after another", done.stdout)
    assert not list(tmp_path.iterdir())


def test_studies_and_recipes_are_listed() -> None:
    assert [one["name"] for one in json.loads(run("study", "--json").stdout)["studies"]] == study_names()
    assert "blend" in run("study").stdout and "digits-iterative" in run("run").stdout
    text = run("run", "vgg16-cifar10-iterative", "--show").stdout
    assert any(line.split()[:2] == ["retrain.epochs", "150"] for line in text.splitlines())
    keys = json.loads(run("run", "digits-iterative", "--show", "--json").stdout)["keys"]
    assert {"key": "train.epochs", "value": 8, "meaning": "epochs of training"} in keys


def test_a_study_in_two_processes_gives_the_runs_of_one(tmp_path: Path) -> None:
    words = ["study", "paper-fully-connected", *SMALL, "--set=prune.methods=[magnitude]", "--json"]
    assert run(*words, "--out", tmp_path / "one").returncode == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sipp"]
    done = subprocess.run(
        [*launch, *map(str, words), "--out", str(tmp_path / "two")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # of one process: the other only helps
    assert [one["n_made"] for one in told["runs"]] == [2, 2] and Path(told["page"]).is_file()
    names = [sorted(path.name for path in (tmp_path / folder).iterdir()) for folder in ("one", "two")]
    assert names[0] == names[1]


def test_a_study_hands_its_engine_to_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def on_ray(job: Any, options: RayOptions) -> Iterator[Any]:
        asked.append((job.recipe.name, options))
        yield from ()

    monkeypatch.setattr("sipp_lab.runs.running.run_on_ray", on_ray)
    monkeypatch.setattr("sipp_lab.runs.running.check_ray", lambda options: None)
    words = ["paper-fully-connected", *SMALL, "--out", tmp_path, "--engine", "ray", "--at-once", 3]
    run("study", *words)
    assert asked == [(name, RayOptions("local", 3)) for name in ("digits-fc-iterative", "digits-fc-at-init")]
    done = run("study", "paper-fully-connected", *SMALL, "--out", tmp_path, "--at-once", 3)
    assert done.returncode == 2 and "engine" in done.stderr
