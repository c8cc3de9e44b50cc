"""`sipp compare`: the table and the sentence on a terminal, one document with --json."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import run, three_lines

import sipp


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(120, 6)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=rng.integers(0, 3, size=120))
    np.save(tmp_path / "holdout.npy", rng.normal(size=(60, 6)).astype(np.float32))
    return tmp_path / "data.npz"


def test_compare_json_equals_sipp_compare(data: Path) -> None:
    words = [
        "--model",
        "cli_zoo:mlp",
        "--data",
        data,
        "--keeps",
        "0.7,0.4",
        "--methods",
        "magnitude, sipp-blend",
        "--repair",
    ]
    done = run("compare", *words, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    arrays = np.load(data)
    batches = [(torch.from_numpy(arrays["inputs"]), torch.from_numpy(arrays["labels"]))]
    found = sipp.compare(mlp().eval(), batches, keeps=(0.7, 0.4), methods=("magnitude", "sipp-blend"), repair=True)
    assert told["kind"] == "comparison" and told["sentence"] == found.sentence
    assert told["best_methods"] == [found.best(keep).name for keep in (0.7, 0.4)]
    rows = [(r["method"], r["keep"], r["is_repaired"], r["error"], r["same"], r["accuracy"]) for r in told["rows"]]
    assert rows == [(r.method, r.keep, r.is_repaired, r.error, r.same, r.accuracy) for r in found.rows]
    shown = run("compare", *words)
    assert shown.returncode == 0 and shown.stdout.endswith(str(found) + "\n")


def test_compare_measures_on_a_given_holdout(data: Path) -> None:
    words = ["--model", "cli_zoo:mlp", "--data", data, "--keeps", 0.5, "--methods", "magnitude", "--json"]
    told = json.loads(run("compare", *words, "--holdout", data.with_name("holdout.npy")).stdout)
    assert (told["n_calibration"], told["n_test"], told["is_held_back"]) == (120, 60, False)
    assert told["holdout"]["n_inputs"] == 60 and told["dense_accuracy"] is None


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (["--keeps", "0.5,,1"], "--keeps"),
        (["--keeps", "0.5,2"], "--keeps"),
        (["--methods", "magnitude,nope"], "--methods"),
        (["--holdout", "random:9x6"], "--holdout"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: list[object], where: str, data: Path) -> None:
    done = run("compare", "--model", "cli_zoo:mlp", "--data", data, *change)
    assert done.returncode == 2 and three_lines(done.stderr)[1].startswith(where) and done.stdout == ""
