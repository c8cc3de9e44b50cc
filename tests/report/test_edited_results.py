"""Results edited by hand: what `sipp run` refuses or makes anew is not drawn; what cannot be checked is marked."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.commandline import files_in, run, three_lines

from sipp.errors import DataError
from sipp.report.results import read_intact_results, read_pruned_result
from sipp.storage.files import read_json, write_json
from sipp_lab.recipes import Recipe, load_recipe
from sipp_lab.runs.folder import read_run
from sipp_lab.runs.running import run as run_recipe

SMALL = (
    "train.epochs=1",
    "train.warmup_epochs=0.0",
    "train.decay={factor: 0.5, every: 1}",
    "train.batch_size=512",
    "prune.levels=1",
    "prune.methods=[sipp-det]",
    "data.n_calibration=20",
    "data.n_holdout=60",
)
LEVEL = "seed0.sipp-det.01"


def recipe() -> Recipe:
    return load_recipe("digits-iterative", settings=SMALL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `runs` with a finished run, and a folder of `sipp prune` with a certificate."""
    base = tmp_path_factory.mktemp("whole")
    run_recipe(recipe(), out=base / "runs", device="cpu")
    rng = np.random.default_rng(0)
    for name in ("calibration", "holdout"):
        np.save(base / f"{name}.npy", rng.normal(size=(80, 1, 8, 8)).astype(np.float32))
    words = ["--model", "digits-cnn", "--data", base / "calibration.npy", "--holdout", base / "holdout.npy"]
    done = run("prune", *words, "--keep", 0.5, "--out", base / "net")
    assert done.returncode == 0, done.stderr
    return base


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    (found,) = (whole / "runs").iterdir()
    return Path(shutil.copytree(found, tmp_path / "runs" / found.name))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read_run(folder)
    assert words in str(caught.value), caught.value


def test_a_whole_run_and_a_whole_network_have_no_marks(folder: Path, whole: Path) -> None:
    assert read_run(folder).notes == () and read_run(folder).finished
    assert read_pruned_result(whole / "net").notes == ()


@pytest.mark.parametrize("old", ['"seed"', '"epochs": 1', '"digits-cnn"'])
def test_a_manifest_that_was_edited_is_refused_as_the_run_refuses_it(folder: Path, old: str) -> None:
    path = folder / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, old.replace("s", "z").replace("1", "2"), 1))
    refused(folder, "manifest.json")
    with pytest.raises(DataError, match="checksum"):
        run_recipe(recipe(), out=folder.parent, device="cpu")


def test_records_are_compared_with_those_of_their_networks_and_made_anew(folder: Path) -> None:
    path = folder / "records.jsonl"
    text = path.read_text()
    first, second = text.splitlines()
    other = second.replace('"kept": ', '"kept": 1')
    path.write_text(f"{first}\n{other}\n")
    refused(folder, "records.jsonl line 2")
    path.write_text(text + second + "\n")
    refused(folder, "line 3: seed0.sipp-det.01 is in the file twice")
    run_recipe(recipe(), out=folder.parent, device="cpu")
    assert path.read_text() == text and read_run(folder).notes == ()


def test_a_damaged_network_of_a_run_is_refused(folder: Path) -> None:
    path = folder / LEVEL / "final.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(folder, "final.safetensors: its tensors do not have the SHA-256")


def test_records_without_their_networks_are_marked_on_the_page_and_in_words(folder: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder / LEVEL)
    lines = (folder / "records.jsonl").read_text().splitlines()
    lines[1] = lines[1].replace('"kept": ', '"kept": 1')
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    page = tmp_path / "page.html"
    done = run("report", folder, "--out", page)
    told = "The networks of 1 of 2 records are missing, so these records could not be checked"
    assert done.returncode == 0 and f"marked: {folder.name}: {told}" in done.stdout and told in page.read_text()
    listed = json.loads(run("report", folder, "--out", page, "--force", "--json").stdout)["marked"]
    assert [one["name"] for one in listed] == [folder.name] and told in listed[0]["what"]


def test_other_code_and_another_name_are_marked(folder: Path) -> None:
    values = read_json(folder / "manifest.json")
    values["origins"][-1]["code"] = "sipp 0.0.1"
    write_json(folder / "manifest.json", values)
    other = folder.rename(folder.with_name("mine"))
    assert ["different version" in mark or "renamed" in mark for mark in read_run(other).notes] == [True, True]


def test_a_changed_run_is_not_drawn(folder: Path, tmp_path: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"digits-cnn"', '"resnet56"'))
    before = files_in(tmp_path)
    done = run("report", folder, "--out", tmp_path / "page.html")
    what, _, _ = three_lines(done.stderr)
    assert done.returncode == 2 and "changed after it was written" in what and files_in(tmp_path) == before
    other = shutil.copytree(folder, folder.with_name("other"))
    (other / "manifest.json").write_text(text)
    page = tmp_path / "page.html"
    done = run("report", folder.parent, "--out", page)  # beside another one it is named
    assert done.returncode == 0 and f"Not shown: {folder.name} is broken" in page.read_text()
    assert "changed after it was written" in page.read_text() and "changed after it was written" in done.stdout


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
