"""The command line as a user types it: output, exit codes, and one line for wrong input."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sipp
from sipp.cli import main
from sipp.nets import build


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*words: object) -> Done:
    """What the command line does with these words, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", ["sipp", *map(str, words)]):
        try:
            main()
        except SystemExit as stop:
            return Done(int(stop.code or 0), out.getvalue(), err.getvalue())
    return Done(0, out.getvalue(), err.getvalue())


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


def test_version_as_installed() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "sipp", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"sipp {sipp.__version__}"


def test_certify_writes_a_certificate_that_verifies(files: Path) -> None:
    cert = files / "cert.json"
    done = run(*options(files), "--calibration", files / "calibration.npy", "--out", cert)
    assert done.returncode == 0, done.stderr
    assert "With 95 % confidence" in done.stdout
    assert json.loads(cert.read_text())["verdict"] == "certified"
    again = run(*options(files), "--verify", cert)
    assert (again.returncode, again.stdout.strip()) == (0, "verified")
    other = run(*options(files)[:-4], "--pruned", files / "dense.safetensors", *options(files)[-2:], "--verify", cert)
    assert other.returncode == 3 and "pruned_hash" in other.stdout


def test_certify_says_no_with_its_own_exit_code(files: Path) -> None:
    done = run(*options(files), "--epsilon", 0)
    assert done.returncode == 3 and "Not certified" in done.stdout
    assert run(*options(files), "--accuracy").returncode == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--model": "resnet21"}, "resnet20"),
        ({"--model": "no.such.module:net"}, "package.module:callable"),
        ({"--dense": "absent.pt"}, "absent.pt"),
        ({"--holdout": "absent.npz"}, "absent.npz"),
        ({"--holdout": "dense.safetensors"}, "expected inputs"),
        ({"--dense": "holdout.npz"}, "could not be read as weights"),
        ({"--model": "lenet-5"}, "does not fit"),
        ({"--delta": "1.5"}, "delta"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(files: Path, change: dict[str, str], words: str) -> None:
    command = [str(word) for word in options(files)]
    for option, value in change.items():
        value = str(files / value) if value.endswith((".pt", ".npz", ".safetensors")) else value
        if option in command:
            command[command.index(option) + 1] = value
        else:
            command += [option, value]
    done = run(*command)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pickle_that_runs_code_is_refused(files: Path, tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"weight": Canary()}, tmp_path / "bad.pt")
    command = options(files)
    command[4] = tmp_path / "bad.pt"
    done = run(*command)
    assert done.returncode == 2 and not (tmp_path / "ran").exists()
