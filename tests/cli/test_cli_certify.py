"""`sipp certify`: the certificate, its exit codes, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import files_in, run, three_lines
from safetensors.torch import load_file, save_file

import sipp
from sipp.cli.model_option import load_model
from sipp_lab.nets import build
from sipp_lab.page import read_results, render


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    net = build("digits-cnn")
    calibration, holdout = torch.rand(40, 1, 8, 8), torch.rand(120, 1, 8, 8)
    pruned = sipp.prune(net, calibration, keep=0.9, method="sipp-det")
    save_file(net.state_dict(), folder / "dense.safetensors")
    torch.save(pruned.model.state_dict(), folder / "pruned.pt")
    np.savez(folder / "holdout.npz", inputs=holdout.numpy(), labels=net(holdout).argmax(1).numpy())
    np.save(folder / "calibration.npy", calibration.numpy())
    return folder


def options(files: Path) -> list[object]:
    return [
        "certify", "--model", "digits-cnn", "--dense", files / "dense.safetensors",
        "--pruned", files / "pruned.pt", "--holdout", files / "holdout.npz",
    ]  # fmt: skip


def test_certify_writes_a_certificate_and_gives_it_again(files: Path) -> None:
    cert = files / "cert.json"
    done = run(*options(files), "--calibration", files / "calibration.npy", "--out", cert)
    assert done.returncode == 0, done.stderr
    assert "With 95 % confidence" in done.stdout
    assert json.loads(cert.read_text())["verdict"] == "certified"
    assert run(*options(files), "--out", cert).returncode == 2  # it is there, and --force was not given
    first = cert.read_bytes()
    again = run(*options(files), "--calibration", files / "calibration.npy", "--out", cert, "--force")
    assert again.returncode == 0 and cert.read_bytes() == first


def test_networks_of_a_run_and_prefixes_of_wrappers_are_read(files: Path, tmp_path: Path) -> None:
    state = build("digits-cnn").state_dict()
    masks = {f"mask.{name}": torch.ones_like(value, dtype=torch.bool) for name, value in state.items()}
    save_file({**{f"model.{name}": value for name, value in state.items()}, **masks}, tmp_path / "final.safetensors")
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "ddp.pt")
    old = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    assert len(old) < len(state)  # checkpoints from before BatchNorm counted its batches
    save_file(old, tmp_path / "old.safetensors")
    for name in ("final.safetensors", "ddp.pt", "old.safetensors"):
        loaded = load_model("digits-cnn", tmp_path / name).state_dict()
        assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_a_prefix_that_is_the_network_s_own_stays(tmp_path: Path) -> None:
    state = load_model("cli_zoo:wrapped").state_dict()
    assert all(name.startswith("model.") for name in state)
    torch.save({name: value + 1 for name, value in state.items()}, tmp_path / "own.pt")
    loaded = load_model("cli_zoo:wrapped", tmp_path / "own.pt").state_dict()
    assert all(torch.equal(loaded[name], value + 1) for name, value in state.items())


def test_certify_says_no_with_its_own_exit_code(files: Path) -> None:
    done = run(*options(files), "--epsilon", 0, "--out", files / "no.json")
    assert done.returncode == 3 and "Not certified" in done.stdout
    assert not (files / "no.json").exists()
    assert run(*options(files), "--accuracy").returncode == 0


def test_one_claim_at_a_time(files: Path) -> None:
    assert run(*options(files), "--accuracy", "--epsilon", 0.1).returncode == 2


def test_json_is_the_certificate_itself(files: Path) -> None:
    done = run(*options(files), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["verdict"] == "certified"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--model": "resnet21"}, "resnet20"),
        ({"--model": "no.such.module:net"}, "no.such.module"),
        ({"--dense": "absent.pt"}, "absent.pt"),
        ({"--holdout": "absent.npz"}, "absent.npz"),
        ({"--holdout": "dense.safetensors"}, "inputs along dimension 0"),
        ({"--holdout": "random:100x1x8x8"}, "noise"),
        ({"--calibration": "holdout.npz"}, "also calibration inputs"),
        ({"--dense": "holdout.npz"}, "could not be read as weights"),
        ({"--model": "lenet-5"}, "does not fit"),
        ({"--share": "1.5"}, "share"),
    ],
)
def test_wrong_input_is_three_lines_and_exit_2(files: Path, change: dict[str, str], words: str) -> None:
    command = [str(word) for word in options(files)]
    for option, value in change.items():
        value = str(files / value) if value.endswith((".pt", ".npz", ".safetensors")) else value
        if option in command:
            command[command.index(option) + 1] = value
        else:
            command += [option, value]
    before = files_in(files)
    done = run(*command, "--out", files / "refused.json")
    assert done.returncode == 2
    three_lines(done.stderr)
    assert words in done.stderr and done.stdout == ""
    assert files_in(files) == before


@pytest.fixture
def pruned(files: Path, tmp_path: Path) -> Path:
    """A folder of `sipp prune`, with a certificate of its own."""
    data = ["--data", files / "calibration.npy", "--holdout", files / "holdout.npz"]
    words = ["prune", "--model", "digits-cnn", "--weights", files / "dense.safetensors", *data, "--keep", 0.9]
    done = run(*words, "--out", tmp_path / "sparse")
    assert done.returncode == 0, done.stderr
    return tmp_path / "sparse"


def folder_words(files: Path, folder: Path, holdout: str) -> list[object]:
    dense = ["--dense", files / "dense.safetensors", "--pruned", folder]
    return ["certify", "--model", "digits-cnn", *dense, "--holdout", files / holdout]


def test_a_folder_knows_the_points_that_chose_it(files: Path, pruned: Path) -> None:
    done = run(*folder_words(files, pruned, "calibration.npy"), "--share", 0.1)
    assert done.returncode == 2 and "40 of 40 holdout inputs are also" in done.stderr
    done = run(*folder_words(files, pruned, "holdout.npz"), "--json")
    assert json.loads(done.stdout)["calibration_checked"] and "could not check" not in done.stdout
    seen = json.loads((pruned / "report.json").read_text())["seen"]
    assert len(seen) == 40 and seen[0] not in render(read_results([pruned]))  # on the page it is noise
    np.save(files / "unrelated.npy", np.random.default_rng(6).random((9, 1, 8, 8), dtype=np.float32))
    other = ["--calibration", files / "unrelated.npy"]  # adds to what the folder knows
    done = run(*folder_words(files, pruned, "calibration.npy"), "--share", 0.1, *other)
    assert done.returncode == 2 and "40 of 40 holdout inputs are also" in done.stderr
    done = run(*folder_words(files, pruned, "unrelated.npy"), *other)
    assert done.returncode == 2 and "9 of 9 holdout inputs are also" in done.stderr
    done = run(*folder_words(files, pruned / "model.safetensors", "calibration.npy"), "--share", 0.1)
    assert done.returncode == 2 and "40 of 40 holdout inputs are also" in done.stderr
    report = (pruned / "report.json").read_text()
    for damaged in ("garbage", report.replace('"seed": 0', '"seed": 1')):  # the network's own header knows them too
        (pruned / "report.json").write_text(damaged)
        done = run(*folder_words(files, pruned, "calibration.npy"), "--share", 0.1)
        assert done.returncode == 2 and "40 of 40 holdout inputs are also" in done.stderr
    (pruned / "report.json").write_text(report)
    weights = load_file(pruned / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, pruned / "model.safetensors")
    done = run(*folder_words(files, pruned, "holdout.npz"), "--json")
    assert not json.loads(done.stdout)["calibration_checked"]  # other weights: who chose them is not known


def test_a_page_names_certificates_that_share_a_holdout(files: Path, pruned: Path) -> None:
    said = "certificates rest on the same holdout"
    assert said not in render(read_results([pruned]))
    np.save(files / "new.npy", np.random.default_rng(5).random((120, 1, 8, 8), dtype=np.float32))
    other = run(*folder_words(files, pruned, "new.npy"), "--accuracy", "--out", pruned / "other.json")
    assert other.returncode == 0 and said not in render(read_results([pruned]))
    same = run(*folder_words(files, pruned, "holdout.npz"), "--accuracy", "--out", pruned / "accuracy.json")
    assert same.returncode == 0 and f"2 of these {said}" in render(read_results([pruned]))
