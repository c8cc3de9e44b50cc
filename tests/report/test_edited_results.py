"""A network's folder edited by hand: what is damaged is not drawn; what cannot be checked is marked."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.commandline import run

from sipp.errors import DataError
from sipp.report.results import read_pruned_result
from sipp_lab.page import read_intact_results


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `sipp prune` with a certificate."""
    base = tmp_path_factory.mktemp("whole")
    rng = np.random.default_rng(0)
    for name in ("calibration", "holdout"):
        np.save(base / f"{name}.npy", rng.normal(size=(80, 1, 8, 8)).astype(np.float32))
    words = ["--model", "digits-cnn", "--data", base / "calibration.npy", "--holdout", base / "holdout.npy"]
    done = run("prune", *words, "--keep", 0.5, "--out", base / "net")
    assert done.returncode == 0, done.stderr
    return base


# --- a network of `sipp prune` --------------------------------------------------------------------------------------


@pytest.fixture
def net(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "net", tmp_path / "net"))


def test_the_record_in_the_header_is_the_one_that_counts(net: Path) -> None:
    true = read_pruned_result(net)
    (net / "report.json").write_text("{}")
    read = read_pruned_result(net)
    assert (read.pruned, read.identity) == (true.pruned, true.identity)


def test_the_network_of_a_record(net: Path) -> None:
    path = net / "model.safetensors"
    data = path.read_bytes()
    for change in (data[:-1] + bytes([data[-1] ^ 1]), data[:-8], b""):
        path.write_bytes(change)
        with pytest.raises(DataError, match=r"model\.safetensors"):
            read_pruned_result(net)
    path.unlink()
    assert read_pruned_result(net).notes == ("The network is missing, so its record could not be checked against it.",)
    found, broken = read_intact_results([net.parent])
    assert len(found) == 1 and not broken
