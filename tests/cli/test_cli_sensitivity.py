"""`sipp sensitivity`: the scores of `sipp.sensitivity` in a file, and what `check_assumption` finds."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import files_in, refused, run
from safetensors.torch import load_file

import sipp
from sipp.results import NormStats
from sipp_lab.data.digits import load_digits
from sipp_lab.nets import build


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "data.npy", rng.normal(size=(40, 6)).astype(np.float32))
    np.save(tmp_path / "new.npy", rng.normal(size=(30, 6)).astype(np.float32))
    return tmp_path


def test_the_file_holds_the_scores_and_the_answer_the_assumption(data: Path) -> None:
    words = ["--model", "cli_zoo:mlp", "--data", data / "data.npy", "--holdout", data / "new.npy"]
    done = run("sensitivity", *words, "--c-constant", 1.5, "--k-constant", 2, "--out", data / "s.safetensors", "--json")
    assert done.returncode == 0, done.stderr
    inputs, new = (torch.from_numpy(np.load(data / name)) for name in ("data.npy", "new.npy"))
    expected = sipp.sensitivity(mlp().eval(), inputs, progress=False)
    found = load_file(data / "s.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    seen = sipp.check_assumption(mlp().eval(), inputs, new, c_constant=1.5, k_constant=2.0, progress=False)
    told = json.loads(done.stdout)
    assert [layer["n_holding"] for layer in told["assumption"]["layers"]] == [one.n_holding for one in seen.layers]
    assert [layer["es_failures"] for layer in told["assumption"]["layers"]] == [one.es_failures for one in seen.layers]
    assert (told["assumption"]["verdict"], told["n_scores"]) == (seen.verdict, 6 * 16 + 16 * 3)
    assert 0 < seen.total.n_holding < seen.total.n_weights  # otherwise the comparison would say little


def test_an_untrained_network_is_scored_with_the_statistics_of_each_batch(tmp_path: Path) -> None:
    images = load_digits().images[:30].numpy()
    np.save(tmp_path / "data.npy", images)
    found = {}
    for chosen in ((), ("--batchnorm", "running"), ("--batchnorm", "batch")):
        out = tmp_path / f"{len(found)}.safetensors"
        words = ["--model", "digits-cnn", "--data", tmp_path / "data.npy", "--batch-size", 30, *chosen, "--out", out]
        done = run("sensitivity", *words)
        assert done.returncode == 0, done.stderr
        assert ("statistics of each batch" in done.stdout) == (not chosen)  # it says what nobody asked for
        found[chosen] = load_file(out)["3.weight"]
    torch.manual_seed(0)
    for stats in get_args(NormStats):
        torch.manual_seed(0)
        expected = sipp.sensitivity(build("digits-cnn"), torch.from_numpy(images), norm_stats=stats, progress=False)
        assert torch.equal(found["--batchnorm", stats], expected["3.weight"])
    assert torch.equal(found[()], found["--batchnorm", "batch"])
    assert not torch.equal(found[()], found["--batchnorm", "running"])


def test_refuses(data: Path) -> None:
    words = ["sensitivity", "--model", "cli_zoo:mlp", "--data", data / "data.npy"]
    (data / "there.safetensors").write_bytes(b"mine")
    before = files_in(data)
    refused(run(*words, "--out", data / "there.safetensors"), "--out", "exists")
    refused(
        run(*words, "--out", data / "x.safetensors", "--c-constant", 0),
        "--model",
        "--c-constant 0.0 must be",
        "greater than 0",
    )
    assert files_in(data) == before
