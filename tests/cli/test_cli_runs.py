"""`sipp run`, `sipp study` and `sipp demo`: from nothing to a page, resumed; what would be trained; recipes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import files_in, refused, run, told

from sipp_lab import demo
from sipp_lab.runs.options import RunOptions
from sipp_lab.studies import STUDIES

SMALL = (
    "--set=train.epochs=1", "--set=train.decay={factor: 0.5, every: 1}", "--set=train.batch_size=256",
    "--set=prune.keeps=[0.3]", "--set=repetitions=1", "--set=data.n_holdout=0", "--device=cpu",
)  # fmt: skip
SHORT = ("prune.methods=[magnitude, sipp-hybrid]", "prune.levels=1", "train.epochs=3", "train.decay.milestones=[2]")


def plan(*words: object) -> list[tuple[int, int]]:
    """(there, to train) of each run of the study."""
    found = told("study", *words, "--dry-run")
    assert (found["seconds"] > 0) == (found["n_new"] > 0)
    return [(one["n_there"], one["n_new"]) for one in found["runs"]]


def test_a_study_from_nothing_to_its_page(tmp_path: Path) -> None:
    words = ["paper-fully-connected", *SMALL, "--out", tmp_path, "--set=prune.methods=[magnitude]"]
    assert plan(*words) == [(0, 2), (0, 2)] and not list(tmp_path.iterdir())
    found = told("study", *words)
    assert [one["n_made"] for one in found["runs"]] == [2, 2] and found["page"].endswith("-short.html")
    page = Path(found["page"]).read_text()
    assert "Study paper-fully-connected (short)" in page and "Main comparison" in page
    assert "reproduces no figure of the paper" in page
    assert plan(*words) == [(2, 0), (2, 0)]
    assert "nothing left to do" in run("study", *words).stdout


def test_a_run_is_planned_trained_and_listed(tmp_path: Path) -> None:
    words = ["run", "digits-iterative", *SMALL, "--set=prune.methods=[magnitude]", "--out", tmp_path]
    done = run(*words, "--dry-run")
    assert re.search(r"2 networks and 2 epochs to train: about [0-9.]+ s here for the training alone", done.stdout)
    assert not list(tmp_path.iterdir())
    found = told(*words)
    assert found["n_made"] == 2 and [one["method"] for one in found["records"]] == [None, "magnitude"]
    (listed,) = told("run", "--status", "--out", tmp_path)["runs"]
    assert (listed["state"], listed["n_done"], listed["pipeline"]) == ("finished", 2, "iterative")


def test_a_plan_refuses_what_the_run_refuses(tmp_path: Path) -> None:
    words = ["run", "digits-iterative", *SMALL, "--set=data.n_calibration=5000", "--out", tmp_path]
    for more in ([], ["--dry-run"]):
        refused(run(*words, *more), "sipp run", "leaves nothing to train on: the training part has 1437 items")


def test_studies_and_recipes_are_listed_and_explained() -> None:
    assert [one["name"] for one in told("study")["studies"]] == [*STUDIES]
    assert "digits-iterative" in [one["name"] for one in told("run")["recipes"]]
    text = run("run", "vgg16-cifar10-iterative", "--show").stdout
    assert any(line.split()[:2] == ["retrain.epochs", "150"] for line in text.splitlines())
    keys = told("run", "digits-iterative", "--show")["keys"]
    assert {"key": "train.epochs", "value": 8, "meaning": "epochs of training"} in keys


def test_a_study_hands_its_engine_to_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def on_ray(job: Any) -> Iterator[Any]:
        asked.append((job.recipe.name, job.how.ray_address, job.how.at_once))
        yield from ()

    monkeypatch.setattr("sipp_lab.runs.running.train_on_ray", on_ray)
    monkeypatch.setattr("sipp_lab.runs.running.import_ray", lambda: None)
    words = ["study", "paper-fully-connected", *SMALL, "--out", tmp_path, "--at-once", 3]
    run(*words, "--engine", "ray")
    assert asked == [(name, None, 3) for name in ("digits-fc-iterative", "digits-fc-at-init")]
    assert "--engine ray" in refused(run(*words), "sipp study", "are for Ray")


def accuracies(done: demo.Demo) -> dict[tuple[str | None, int], float]:
    return {(record["method"], record["level"]): record["after"]["top1"] for record in done.records}


def test_two_short_demos_agree_and_end_with_a_page(tmp_path: Path) -> None:
    first, again = (demo.run_demo(tmp_path / name, progress=False, settings=SHORT) for name in ("a", "b"))
    assert accuracies(first) == accuracies(again) and accuracies(first)[None, 0] > 0.8
    assert set(accuracies(first)) == {(None, 0), ("magnitude", 1), ("sipp-hybrid", 1)}
    # The run itself is made anew each time: nothing of it stays beside what it shows.
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["page.html"]
    refused(run("demo", "--out", tmp_path / "a"), "sipp demo", "exists")
    assert max(map(len, str(first).splitlines()[:-1])) <= 80 and "sipp-hybrid" in str(first)


def test_a_stopped_demo_leaves_the_disk_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(recipe: object, how: RunOptions, **options: object) -> None:
        (how.out / "half").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("sipp_lab.demo.run", stopped)
    assert run("demo", "--out", tmp_path / "new").returncode == 130 and not files_in(tmp_path)
