"""`sipp.save_folder`: the folder of `sipp prune --out`, written whole, refused where it would destroy or mislead."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.results.network_hash import model_hash
from sipp.storage import pruned_folder
from sipp.storage.outputs import RECORD_KEY, RECORD_NAME, WEIGHTS_NAME
from sipp.storage.pruned_folder import OTHER_COPY, read_pruned
from sipp.storage.tensors import metadata_in, tensors_to_bytes


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


@pytest.fixture(scope="module")
def pruned(dense: nn.Module) -> sipp.Pruned:
    return sipp.prune(dense, torch.rand(80, 8, generator=torch.Generator().manual_seed(1)), keep=0.5, repair=True)


@pytest.fixture(scope="module")
def certificate(dense: nn.Module, pruned: sipp.Pruned) -> object:
    return sipp.certify(dense, pruned.model, torch.rand(100, 8, generator=torch.Generator().manual_seed(2)))


def test_the_folder_reads_back(pruned: sipp.Pruned, tmp_path: Path) -> None:
    folder = sipp.save_folder(pruned, tmp_path / "deep" / "net")
    assert sorted(os.listdir(folder)) == [WEIGHTS_NAME, RECORD_NAME]
    record, notes = read_pruned(folder)
    assert (record.pruned.kept, record.pruned.method, record.identity.dense_hash, notes) == (
        pruned.kept,
        "sipp-blend",
        None,
        (),
    )
    state = load_file(folder / WEIGHTS_NAME)
    assert all(torch.equal(state[name], value) for name, value in pruned.model.state_dict().items())
    values = json.loads((folder / RECORD_NAME).read_text())
    assert values["repair"]["layers"] and values["model"] == "torch.nn.modules.container.Sequential"


def test_inputs_that_are_too_many_for_a_header_are_left_out_with_a_word(
    pruned: sipp.Pruned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(pruned.seen) > 50 and read_pruned(sipp.save_folder(pruned, tmp_path / "a"))[0].pruned.seen == pruned.seen
    monkeypatch.setattr(pruned_folder, "MOST_SEEN", 50)
    with pytest.warns(UserWarning, match="too many inputs"):
        folder = sipp.save_folder(pruned, tmp_path / "b")
    report, notes = read_pruned(folder)
    facts = report.pruned
    assert (facts.seen, facts.seen_all, facts.kept, notes) == (frozenset(), False, pruned.kept, ())


def test_a_record_that_fits_no_header_is_refused_in_words() -> None:
    with pytest.raises(ModelError, match="100 MB"):
        tensors_to_bytes({"a": torch.zeros(1)}, {RECORD_KEY: "x" * 100_000_001})


def test_a_certificate_says_what_was_dense(
    dense: nn.Module, pruned: sipp.Pruned, certificate: object, tmp_path: Path
) -> None:
    record, _ = read_pruned(sipp.save_folder(pruned, str(tmp_path / "net"), certificate=certificate))  # type: ignore[arg-type]
    assert record.identity.dense_hash == model_hash(dense) and record.identity.certificate == certificate
    other = sipp.prune(dense, None, keep=0.2, method="wt")
    with pytest.raises(OptionError, match="another network"):
        sipp.save_folder(other, tmp_path / "other", certificate=certificate)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", [RECORD_NAME, WEIGHTS_NAME])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_in_a_folder_of_others_is_not_written_through(
    pruned: sipp.Pruned, tmp_path: Path, name: str, is_there: bool
) -> None:
    folder, mine = sipp.save_folder(pruned, tmp_path / "net"), tmp_path / "mine"
    if is_there:
        (folder / name).rename(mine)  # so that the folder is whole, with the link
    before = mine.read_bytes() if is_there else None
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine)
    with pytest.raises(OptionError, match=f"{name} is a symbolic link"):
        sipp.save_folder(pruned, folder)
    assert (mine.read_bytes() if mine.exists() else None) == before and (folder / name).is_symlink()


def test_only_a_folder_of_the_same_kind_is_replaced(dense: nn.Module, pruned: sipp.Pruned, tmp_path: Path) -> None:
    folder = sipp.save_folder(pruned, tmp_path / "net")
    sipp.save_folder(sipp.prune(dense, None, keep=0.25, method="wt"), folder)
    assert read_pruned(folder)[0].pruned.method == "wt"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("three years")
    with pytest.raises(OptionError, match="nothing else is replaced"):
        sipp.save_folder(pruned, mine)
    assert os.listdir(mine) == ["thesis.txt"]


def test_wrong_arguments(pruned: sipp.Pruned, tmp_path: Path) -> None:
    for folder in ("", "a\0b", 3, None):
        with pytest.raises(OptionError, match="not a path"):
            sipp.save_folder(pruned, folder)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="certificate is a str"):
        sipp.save_folder(pruned, tmp_path / "net", certificate="yes")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="is a file"):
        sipp.save_folder(pruned, tmp_path / "file")


def test_a_network_changed_after_it_was_saved_is_refused(pruned: sipp.Pruned, tmp_path: Path) -> None:
    path = sipp.save_folder(pruned, tmp_path / "net") / WEIGHTS_NAME
    state, record = load_file(path), metadata_in(path.open("rb"))
    path.write_bytes(tensors_to_bytes({name: 2 * value for name, value in state.items()}, record))
    with pytest.raises(DataError, match="not those that its record speaks of"):
        read_pruned(path.parent)
    path.write_bytes(tensors_to_bytes(state))
    with pytest.raises(DataError, match="holds no record"):
        read_pruned(path.parent)


def test_another_network_put_into_the_folder_is_shown_as_itself(pruned: sipp.Pruned, tmp_path: Path) -> None:
    folder, other = sipp.save_folder(pruned, tmp_path / "net"), copy.deepcopy(pruned)
    with torch.no_grad():
        next(other.model.parameters()).mul_(2)
    (sipp.save_folder(other, tmp_path / "other") / WEIGHTS_NAME).replace(folder / WEIGHTS_NAME)
    record, notes = read_pruned(folder)
    assert record.identity.pruned_hash == model_hash(other.model) and notes == (OTHER_COPY,)
