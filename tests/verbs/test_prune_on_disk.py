"""A network that is pruned from files to files: bits of the whole way, one block in memory, and it can be stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.data import data_of
from sipp.repairing import repair_network, split_data
from sipp.results import numerics
from sipp.verbs import prune_on_disk as on_disk
from sipp_lab.page import read_results

N_BLOCKS, WIDTH = 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(scale * self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
        self.layers = nn.ModuleList(Block() for _ in range(N_BLOCKS))
        self.head = nn.Linear(WIDTH, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.scale)
        return self.head(x)


def dense() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def empty() -> Model:
    net = Model()
    for name, parameter in list(net.named_parameters()):
        owner, _, local = name.rpartition(".")
        setattr(net.get_submodule(owner), local, nn.Parameter(parameter.detach().to("meta")))
    return net


def points() -> list[Tensor]:
    return list(torch.randint(0, 20, (30, 5), generator=torch.Generator().manual_seed(1)).split(15))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The weights in two files with an index."""
    folder, tensors = tmp_path / "dense", dense().state_dict()
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file_of = {name: f"model-0000{1 + ('layers.2' in name)}-of-00002.safetensors" for name in tensors}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("goal", [{"keep": 0.5}, {"pattern": "2:4"}])
def test_a_row_by_row_method_has_the_bits_of_the_whole_way(source: Path, tmp_path: Path, goal: dict[str, Any]) -> None:
    done = sipp.prune_on_disk(empty(), source, points(), tmp_path / "out", method="wanda", **goal)
    whole = sipp.prune(dense(), points(), method="wanda", include="layers.*", statements=False, progress=False, **goal)
    assert same(tensors_in(tmp_path / "out"), whole.model.state_dict())
    assert (done.kept, done.n_weights, done.n_blocks) == (whole.kept, 4 * 2 * WIDTH * 12, N_BLOCKS)
    assert (tmp_path / "out" / "config.json").read_text() == "{}" and not (tmp_path / "out" / "work").exists()
    assert "50.0%" in str(done)
    with pytest.raises(DataError, match=r"plain Hugging Face folder.*from_pretrained, or give it to sipp eval"):
        sipp.inspect(done.folder)
    with pytest.raises(DataError, match=r"plain Hugging Face folder"):
        read_results([done.folder])


def test_a_repair_has_the_bits_of_the_whole_way(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sipp.prune_on_disk(empty(), source, points(), tmp_path / "out", keep=0.5, repair=True)
    net = dense()
    masks = sipp.prune(net, points(), method="wanda", include="layers.*", keep=0.5, statements=False).masks
    parts = split_data(data_of(points()))
    monkeypatch.setattr(numerics, "MOST_WEIGHTS_OF_SMALL", 100)  # as large networks are repaired
    whole = repair_network(net, masks, parts)
    assert same(tensors_in(tmp_path / "out"), whole.model.state_dict())


def test_one_block_is_in_memory_at_a_time(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, prune_block = list[int](), on_disk._prune_block

    def counted(work: Any, i: int) -> Any:
        found = prune_block(work, i)
        loaded.append(sum(not p.is_meta for p in work.network.model.layers.parameters()))
        return found

    def weights(*args: Any, **kwargs: Any) -> Any:
        loaded.append(sum(p.numel() for p in network_of[0].layers.parameters() if not p.is_meta))
        return rank(*args, **kwargs)

    network_of: list[Any] = []
    rank, init = on_disk.rank, on_disk.NetworkInFiles.__init__

    def noted(self: Any, model: nn.Module, *args: Any) -> None:
        network_of.append(model)
        init(self, model, *args)

    monkeypatch.setattr(on_disk, "_prune_block", counted)
    monkeypatch.setattr(on_disk, "rank", weights)
    monkeypatch.setattr(on_disk.NetworkInFiles, "__init__", noted)
    sipp.prune_on_disk(empty(), source, points(), tmp_path / "out", keep=0.5)
    one = sum(p.numel() for p in Block().parameters())
    assert loaded == [one, 0] * N_BLOCKS


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("repair", [False, True])
def test_a_run_that_was_stopped_twice_ends_with_the_same_bits(
    source: Path, tmp_path: Path, repair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: str) -> Any:
        return sipp.prune_on_disk(empty(), source, points(), tmp_path / folder, keep=0.5, repair=repair)

    run("undisturbed")
    write, finish = on_disk.BlockFolder.write, on_disk.BlockFolder.finish
    stops = (("write", write, 1), ("finish", finish, 1), ("write", write, 3))  # before any note, and between two states
    for method, whole, at in stops:

        def stopping(self: Any, i: int, *args: Any, whole: Any = whole, at: int = at) -> Any:
            if i == at:
                raise Stopped
            return whole(self, i, *args)

        monkeypatch.setattr(on_disk.BlockFolder, method, stopping)
        with pytest.raises(Stopped):
            run("stopped")
        monkeypatch.setattr(on_disk.BlockFolder, method, whole)
    done = run("stopped")
    assert done.n_resumed == 2 and "2 of them by an earlier run" in done.sentence
    assert same(tensors_in(tmp_path / "stopped"), tensors_in(tmp_path / "undisturbed"))


def test_what_cannot_go_on_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sipp.prune_on_disk(empty(), source, points(), out, keep=0.5)
    with pytest.raises(OptionError, match="started with other options"):
        sipp.prune_on_disk(empty(), source, points(), out, keep=0.4)
    part = next(source.glob("*2-of-00002.safetensors"))
    before = part.read_bytes()
    save_file({name: tensor + 1 for name, tensor in load_file(part).items()}, part)  # as large, and another network
    with pytest.raises(OptionError, match="other options, weights or inputs"):
        sipp.prune_on_disk(empty(), source, points(), out, keep=0.5)
    part.write_bytes(before)
    with pytest.raises(OptionError, match="contains other files"):
        sipp.prune_on_disk(empty(), source, points(), source, keep=0.5)
    with pytest.raises(OptionError, match="one of keep and pattern"):
        sipp.prune_on_disk(empty(), source, points(), tmp_path / "a", keep=0.5, pattern="2:4")
    with pytest.raises(DataError, match="no weights could be read"):
        sipp.prune_on_disk(empty(), tmp_path, points(), tmp_path / "b", keep=0.5)
    with pytest.raises(ModelError, match="no list of blocks"):
        sipp.prune_on_disk(nn.Linear(3, 3, device="meta"), source, points(), tmp_path / "c", keep=0.5)
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"embed.weight": "../dense/x.safetensors"}}')
    with pytest.raises(DataError, match="which does not exist"):
        sipp.prune_on_disk(empty(), source, points(), tmp_path / "d", keep=0.5)
