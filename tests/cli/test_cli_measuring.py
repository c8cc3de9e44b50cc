"""`compare`, `sensitivity`, `certify` and `eval`: what the public functions give, in print and as JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import refused, run, three_lines, told
from safetensors.torch import load_file, save_file

import sipp

NET = ["--model", "cli_zoo:mlp"]
BOTH = [*NET, "--dense", "dense.safetensors", "--pruned", "net"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled inputs on which the dense network is right on 270 of 300, others, and a pruned network."""
    folder = tmp_path_factory.mktemp("measured")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6)).astype(np.float32)
    labels = mlp()(torch.from_numpy(x)).argmax(1).numpy()
    labels[:30] = (labels[:30] + 1) % 3
    np.savez(folder / "data.npz", inputs=x, labels=labels)
    np.save(folder / "plain.npy", x)
    np.save(folder / "calibration.npy", rng.normal(size=(40, 6)).astype(np.float32))
    save_file(mlp().state_dict(), folder / "dense.safetensors")
    words = [*NET, "--weights", folder / "dense.safetensors", "--data", folder / "calibration.npy", "--keep", 0.7]
    assert run("prune", *words, "--out", folder / "net").returncode == 0
    return folder


@pytest.fixture(autouse=True)
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    held = np.load("data.npz")
    return torch.from_numpy(held["inputs"]), torch.from_numpy(held["labels"])


# --- compare and sensitivity ------------------------------------------------------------------------------------------


def test_compare_is_sipp_compare() -> None:
    words = [*NET, "--data", "data.npz", "--keeps", "0.7,0.4", "--methods", "magnitude, sipp-blend", "--repair"]
    found = sipp.compare(
        mlp().eval(), [arrays()], keeps=(0.7, 0.4), methods=("magnitude", "sipp-blend"), repair=True, progress=False
    )
    record = told("compare", *words)
    assert record["kind"] == "comparison" and record["sentence"] == found.sentence
    rows = [(r["method"], r["keep"], r["is_repaired"], r["error"], r["same"], r["accuracy"]) for r in record["rows"]]
    assert rows == [(r.method, r.keep, r.is_repaired, r.error, r.same, r.accuracy) for r in found.rows]
    assert run("compare", *words).stdout.endswith(f"{found}\n")
    held = told("compare", *NET, "--data", "data.npz", "--methods", "magnitude", "--holdout", "calibration.npy")
    assert (held["n_calibration"], held["n_test"], held["is_held_back"]) == (300, 40, False)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (["--keeps", "0.5,,1"], "--keeps"),
        (["--keeps", "0.5,2"], "--keeps"),
        (["--methods", "magnitude,nope"], "--model"),
        (["--holdout", "absent.npy"], "--holdout"),
    ],
)
def test_a_comparison_that_cannot_be_meant_is_refused(change: list[object], where: str) -> None:
    refused(run("compare", *NET, "--data", "data.npz", *change), where)


def test_sensitivities_in_a_file_and_what_holds_of_the_assumption(tmp_path: Path) -> None:
    words = [*NET, "--data", "calibration.npy", "--holdout", "plain.npy", "--c-constant", 1.5, "--k-constant", 2]
    record = told("sensitivity", *words, "--out", tmp_path / "s.safetensors")
    inputs, new = (torch.from_numpy(np.load(name)) for name in ("calibration.npy", "plain.npy"))
    expected = sipp.sensitivity(mlp().eval(), inputs, progress=False)
    found = load_file(tmp_path / "s.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    seen = sipp.check_assumption(mlp().eval(), inputs, new, c_constant=1.5, k_constant=2.0, progress=False)
    assert [layer["n_holding"] for layer in record["assumption"]["layers"]] == [one.n_holding for one in seen.layers]
    assert (record["assumption"]["verdict"], record["n_scores"]) == (seen.verdict, 6 * 16 + 16 * 3)
    assert 0 < seen.total.n_holding < seen.total.n_weights  # otherwise the comparison would say little
    refused(run("sensitivity", *words, "--out", tmp_path / "s.safetensors"), "--out", "exists")


# --- certify ----------------------------------------------------------------------------------------------------------


def test_certify_writes_a_certificate_and_gives_it_again(tmp_path: Path) -> None:
    words = ["certify", *BOTH, "--holdout", "data.npz", "--out", tmp_path / "cert.json"]
    assert "With 95 % confidence" in run(*words).stdout
    written = json.loads((tmp_path / "cert.json").read_text())
    pruned = mlp().eval()
    pruned.load_state_dict(load_file("net/model.safetensors"))
    assert written["epsilon"] == sipp.certify(mlp().eval(), pruned, arrays()[0], progress=False).epsilon
    refused(run(*words), "--out", "exists")
    again = told(*words, "--force")
    assert again.items() <= written.items() and again["calibration_checked"]  # the folder knows what chose it
    drop = told("certify", *BOTH, "--holdout", "data.npz", "--accuracy")
    assert drop["mode"] == "labels" and drop["accuracies"][0] == 0.9


def test_certify_says_no_with_its_own_exit_code(tmp_path: Path) -> None:
    done = run("certify", *BOTH, "--holdout", "data.npz", "--epsilon", 0, "--out", tmp_path / "no.json")
    assert done.returncode == 3 and "Not certified" in done.stdout and not (tmp_path / "no.json").exists()


def test_inputs_that_chose_the_network_are_refused(made: Path, tmp_path: Path) -> None:
    for pruned in ("net", "net/model.safetensors"):
        words = [*BOTH[:-1], pruned, "--holdout", "calibration.npy", "--share", 0.1]
        refused(run("certify", *words), "--holdout", "40 of 40 holdout inputs are also calibration inputs")
    other = {name: value + 1 for name, value in load_file("net/model.safetensors").items()}
    save_file(other, tmp_path / "other.safetensors")  # who chose these weights is not known
    words = [*BOTH[:-1], tmp_path / "other.safetensors", "--holdout", "data.npz"]
    assert not told("certify", *words)["calibration_checked"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--model": "resnet21"}, "resnet20"),
        ({"--dense": "absent.pt"}, "absent.pt"),
        ({"--dense": None}, "give --dense FILE"),
        ({"--dense": "data.npz"}, "could not be read as weights"),
        ({"--model": "lenet-5"}, "does not fit"),
        ({"--holdout": "absent.npz"}, "neither a file, a folder nor the name of a data set"),
        ({"--share": "1.5"}, "share"),
        ({"--accuracy": True, "--epsilon": "0.1"}, "cannot be combined"),
    ],
)
def test_wrong_input_is_three_lines_and_exit_2(change: dict[str, object], words: str) -> None:
    options: dict[str, object] = dict(zip(BOTH[::2], BOTH[1::2])) | {"--holdout": "data.npz"} | change  # type: ignore[arg-type]
    typed = [word for name, value in options.items() if value is not None for word in (name, value) if word is not True]
    done = run("certify", *typed)
    assert done.returncode == 2 and done.stdout == "" and three_lines(done.stderr) and words in done.stderr


# --- eval -------------------------------------------------------------------------------------------------------------


def test_accuracy_loss_and_error_are_those_of_the_networks(tmp_path: Path) -> None:
    found = told("eval", *BOTH, "--data", "data.npz")
    x, labels = arrays()
    dense, pruned = mlp().eval(), mlp().eval()
    pruned.load_state_dict(load_file("net/model.safetensors"))
    with torch.no_grad():
        f, g = dense(x).double(), pruned(x).double()
    far = (g - f).norm(dim=1) / f.norm(dim=1)
    assert found["accuracies"][0] == 0.9 and found["n_inputs"] == 300
    assert found["accuracies"][1] == float((g.argmax(1) == labels).double().mean())
    assert found["same_class"] == float((g.argmax(1) == f.argmax(1)).double().mean())
    assert found["losses"][1] == pytest.approx(float(torch.nn.functional.cross_entropy(g, labels)), rel=1e-6)
    assert found["error_mean"] == pytest.approx(float(far.mean()), rel=1e-6)
    plain = run("eval", *BOTH, "--data", "plain.npy", "--out", tmp_path / "e.json")
    assert "accuracy:        not measured: plain.npy contains no array 'labels'" in plain.stdout
    assert json.loads((tmp_path / "e.json").read_text())["error_mean"] == found["error_mean"]
