"""`prune_on_disk`: prunes a network that may be larger than memory, block by block, from files to files.

Memory holds one block, what its scores or its repair need, and one batch. The hidden states of all points between two
blocks are in files. A run that was stopped continues after the last finished block when it is started again.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.blocks import Blocks, Call, block_names, enter, find_blocks, same_arguments
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import AnyData, data_of
from sipp.inputs.point_keys import draw_keys_of
from sipp.inputs.scoring_task import task_of
from sipp.native.memory import give_back_large_pieces
from sipp.progress import progress_bar, progress_line
from sipp.pruning.cutting import budget_for, cut
from sipp.pruning.ranking import checked_method, rank
from sipp.pruning.spared_rows import restore_spared, spared_by_name
from sipp.records.batches import Batch
from sipp.records.checking import check_flag, check_path
from sipp.records.numerics import exact_matmul
from sipp.records.options import Method, PruneOptions, Scoring, pattern_of
from sipp.records.pruned_on_disk import BlockWeight, PrunedOnDisk
from sipp.repairing.data_split import DataSplit, split_batches
from sipp.repairing.network_fit import fit_block
from sipp.scoring.methods import refuse_fitted
from sipp.scoring.sensitivities import chunk_of
from sipp.storage.files import child_path, file_hash, make_folder, read_json, sha256_of, write_json
from sipp.storage.renamed_weights import renamed_weights
from sipp.storage.sharded_weights import (
    ShardedWeights,
    companion_files,
    sharded_weights,
    write_index,
    write_shard,
)
from sipp.storage.state_files import load_state, save_state

N_PROBED = 3  # first blocks, run to see how blocks pass their hidden state on
JOURNAL, WORK, REST = "progress.json", "work", "rest.safetensors"
CONFIGS = ("config.json", "generation_config.json")  # copied together with tokenizer files


@torch.inference_mode(False)
def prune_on_disk(
    model: nn.Module,
    weights: str | PathLike[str],
    data: AnyData,
    out: str | PathLike[str],
    *,
    keep: float | None = None,
    pattern: str | None = None,
    method: Method = "wanda",
    repair: bool = False,
    blocks: str | None = None,
    seed: int = 0,
    scoring: Scoring = Scoring(),
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> PrunedOnDisk:
    """Prunes a network whose weights are in files, one block after another, into the folder `out`.

    `model` has no weights (they are on the meta device: `with accelerate.init_empty_weights(): ...`); `weights` is the
    folder with its model.safetensors, or several files and their index. Each block keeps the share `keep`, or the
    pattern; everything before and after the blocks stays dense. The blocks are the list of modules with the most
    weights, or the list that `blocks` names ("model.layers"). `repair=True` finds the mask and the weights together and
    makes up for what earlier blocks lost. Call it again with the same arguments to resume a stopped run.

    Example:
        >>> import sipp, tempfile, torch
        >>> from accelerate import init_empty_weights
        >>> from pathlib import Path
        >>> from safetensors.torch import save_file
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> net = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> folder = Path(tempfile.mkdtemp())
        >>> save_file(net.state_dict(), folder / "model.safetensors")
        >>> with init_empty_weights():
        ...     empty = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to("meta")
        >>> sipp.prune_on_disk(empty, folder, torch.rand(20, 5, 8), folder / "pruned", keep=0.5).n_blocks
        3
    """
    options = PruneOptions(
        keep=keep, pattern=pattern, method=method, seed=seed, scoring=scoring, statements=False, blocks=blocks
    )
    _check(model, options, repair=repair, progress=progress)
    give_back_large_pieces()
    source, target = sharded_weights(check_path("weights", weights, "model")), check_path("out", out, "pruned")
    device = _device(device)
    batches = tuple(data_of(data, device=device, seed=seed).batches())
    split = split_batches(batches) if repair else DataSplit(batches, (False,) * len(batches), (), frozenset())
    network = _NetworkInFiles(copy.deepcopy(model).eval(), source, device, blocks)
    network.load_rest()
    chain = network.find_blocks(split.batches[0])
    output = _OutputFolder(target, _task_hash(options, repair, source, chain, split.batches))
    finished = output.begin()
    calls = _common_call(network, chain, split.batches, output if finished == 0 else None)
    work = _Work(network, chain, calls, split, output, options, repair)
    n_blocks, began = len(chain.names), monotonic()
    with progress_bar("blocks", n_blocks - finished, shown=progress) as advance:
        for i in range(finished, n_blocks):
            line = f"{chain.names[i]} ({i + 1} of {n_blocks}): {_block_summary(_prune_block(work, i))}"
            progress_line(line, shown=progress, seconds=monotonic() - began)
            advance(1)
    journal = output.journal()
    network.write_rest(target, chain, journal["file_of"])
    output.end(source.folder)
    pruned_weights = tuple(BlockWeight(**values) for values in journal["weights"])
    return PrunedOnDisk(target, n_blocks, finished, sum(batch.n_points for batch in split.batches), pruned_weights)


def _check(model: object, options: PruneOptions, *, repair: bool, progress: bool) -> None:
    """Raises for what cannot be pruned block by block."""
    check_flag("progress", progress)
    check_flag("repair", repair)
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}", fix="give an nn.Module without weights")
    if (options.keep is None) == (options.pattern is None):
        raise OptionError("give exactly one of keep and pattern", fix="give keep=0.5 or pattern='2:4'")
    refuse_fitted(options.method, "prune_on_disk fits only with repair=True")
    if "labels" in checked_method(options).needs:
        raise OptionError(
            f"method={options.method!r} needs labels, and states between blocks have none", option="method"
        )


def _device(given: Any) -> torch.device:
    try:
        device = torch.device(given)
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # none, or none that is here
        raise OptionError(
            f"device={given!r:.60} cannot be used", fix="give 'cpu' or 'cuda'", option="device"
        ) from error
    return device


def _block_summary(done: Sequence[BlockWeight]) -> str:
    errors = [weight.error for weight in done if weight.error is not None]
    kept = sum(weight.n_kept for weight in done)
    return f"{kept:,} weights kept" + (f", error of a layer up to {max(errors):.3g}" if errors else "")


class _NetworkInFiles:
    """A network on the meta device, and the files from which its weights are read, one block at a time."""

    def __init__(self, model: nn.Module, source: ShardedWeights, device: torch.device, named: str | None) -> None:
        self.model, self.source, self.device = model, source, device
        self.weights = renamed_weights(model, source)
        self.is_named, self.list_name = named is not None, named or _largest_list(model)
        self.names = block_names(model, self.list_name)

    def load_rest(self) -> None:
        """Loads the weights outside the blocks."""
        inside = tuple(f"{name}." for name in self.names)
        self._load([name for name in self.weights.made_of if not name.startswith(inside)])
        tie = getattr(self.model, "tie_weights", None)
        if callable(tie):
            tie()
        empty = [name for name, p in self.model.named_parameters() if p.is_meta and not name.startswith(inside)]
        if empty:
            raise ModelError(f"the files hold no {empty[0]}", where=self.source.folder)
        for name, buffer in self.model.named_buffers():
            if not buffer.is_meta:
                owner, _, local = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[local] = buffer.to(self.device)

    def load_block(self, i: int) -> nn.Module:
        """Loads block i and returns it."""
        self._load([name for name in self.weights.made_of if name.startswith(f"{self.names[i]}.")])
        block = self.model.get_submodule(self.names[i])
        empty = [name for name, tensor in (*block.named_parameters(), *block.named_buffers()) if tensor.is_meta]
        if empty:
            raise ModelError(f"the files hold no {self.names[i]}.{empty[0]}", where=self.source.folder)
        return block

    def free_block(self, i: int) -> None:
        self.model.get_submodule(self.names[i]).to("meta")

    def find_blocks(self, batch: Batch) -> Blocks:
        """How blocks pass their hidden state on, seen on the first few of them."""
        owner_name, _, local = self.list_name.rpartition(".")
        owner, whole = self.model.get_submodule(owner_name), self.model.get_submodule(self.list_name)
        n_first = min(N_PROBED, len(self.names))
        first = list(whole.children())[:n_first]
        for i in range(n_first):
            self.load_block(i)
        try:
            setattr(owner, local, type(whole)(*first) if isinstance(whole, nn.Sequential) else type(whole)(first))
            blocks = find_blocks(self.model, batch, self.names[:n_first] if self.is_named else None)
        finally:
            setattr(owner, local, whole)
            for i in range(n_first):
                self.free_block(i)
        if blocks is None or blocks.names != self.names[:n_first]:
            raise ModelError(
                f"the modules of {self.list_name} do not pass one state from each to the next",
                fix="prune it whole, with sipp.prune",
            )
        return replace(blocks, names=self.names)

    def write_rest(self, folder: Path, blocks: Blocks, file_of: Mapping[str, str]) -> None:
        """Writes the weights outside the blocks unchanged, and the index; `file_of` lists the tensors of blocks."""
        inside = tuple(f"{name}." for name in blocks.names)
        in_blocks = {file for name, of in self.weights.made_of.items() if name.startswith(inside) for file, _ in of}
        rest = [name for name in self.source.file_of if name not in in_blocks]
        write_shard(folder, REST, self.source.read(rest))
        write_index(
            folder,
            {**file_of, **dict.fromkeys(rest, REST)},
            sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        )

    def _load(self, names: Sequence[str]) -> None:
        for name, tensor in self.weights.read(names).items():
            owner, _, local = name.rpartition(".")
            module = self.model.get_submodule(owner)
            held: Any = module._parameters.get(local)
            shape = module._buffers[local].shape if held is None else held.shape  # type: ignore[union-attr]
            if shape != tensor.shape:
                raise ModelError(f"{name} is {tuple(tensor.shape)} in the files, and {tuple(shape)} in the network")
            if held is None:
                module._buffers[local] = tensor.to(self.device)
            else:
                module._parameters[local] = nn.Parameter(tensor.to(self.device), requires_grad=held.requires_grad)


def _largest_list(model: nn.Module) -> str:
    """The name of the module list with the most weights, among lists whose modules are all of one class."""
    lists = [
        (sum(p.numel() for p in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len({*map(type, module)}) == 1
    ]
    if not lists:
        raise ModelError("the network has no list of blocks of one class", fix="prune it whole, with sipp.prune")
    return max(lists, key=lambda size_and_name: size_and_name[0])[1]


class _Block(nn.Module):
    """A block as a model of its hidden state alone; its parameters keep their names in the whole network."""

    def __init__(self, name: str, block: nn.Module, blocks: Blocks, call: Call) -> None:
        super().__init__()
        self._name, self._blocks, self._call = name, blocks, call
        place: nn.Module = self
        *outer, last = name.split(".")
        for part in outer:
            place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, block)

    def forward(self, state: Tensor) -> Tensor:
        batch = self._blocks.joined(_EMPTY_BATCH, self._call, state)
        return self._blocks.state_of(self.get_submodule(self._name)(*batch.args, **batch.kwargs))


_EMPTY_BATCH = Batch(index=0, where="", args=(), kwargs={}, labels=None, n_points=0)


def _common_call(
    network: _NetworkInFiles, blocks: Blocks, batches: Sequence[Batch], output: _OutputFolder | None
) -> tuple[Call, ...]:
    """The arguments beside the hidden state, block by block, equal for all batches; writes the first states."""
    common: tuple[Call, ...] | None = None
    for j, batch in enumerate(batches):
        entered = enter(network.model, blocks, batch)
        calls = tuple(_for_any_batch(call, batch) for call in entered.calls)
        if common is not None and not same_arguments(common, calls):
            raise DataError(
                "is given other masks or positions than the batches before it",
                where=batch.where,
                fix="give sequences of one length, without padding",
            )
        common = calls
        if output is not None:
            for side in ("dense", "pruned"):
                output.write(0, side, j, entered.state)
    assert common is not None
    return common


def _for_any_batch(value: Any, batch: Batch) -> Any:
    """The argument made to fit any batch size; DataError if it differs between the points of the batch."""
    if isinstance(value, dict):
        return {name: _for_any_batch(inner, batch) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_for_any_batch(inner, batch) for inner in value)
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != batch.n_points or batch.n_points == 1:
        return value
    if not bool((value == value[:1]).all()):
        raise DataError("its inputs have different masks", where=batch.where, fix="give sequences without padding")
    return value[:1]


@dataclass(frozen=True)
class _Work:
    """What the pruning of every block needs."""

    network: _NetworkInFiles
    blocks: Blocks
    calls: Sequence[Call]  # arguments beside the hidden state, by block
    split: DataSplit
    output: _OutputFolder
    options: PruneOptions
    repair: bool

    def states(self, i: int, side: str) -> _StoredStates:
        """The batches as block i receives them, in the dense or in the pruned network."""
        return _StoredStates(self.output, i, side, self.split.batches, self.network.device)


def _prune_block(work: _Work, i: int) -> list[BlockWeight]:
    """Prunes block i, writes its file and the states after it, and marks it as finished."""
    dense = _Block(work.blocks.names[i], work.network.load_block(i), work.blocks, work.calls[i])
    pruned, masks, errors = _cut_and_repaired(work, i, dense)
    tensors = work.network.weights.as_in_files(pruned.state_dict())
    write_shard(work.output.folder, _file(i), tensors)
    sides = (("dense", dense), ("pruned", pruned)) if work.repair else (("dense", dense),)
    for side, block in sides if i + 1 < len(work.blocks.names) else ():
        for j, batch in enumerate(work.states(i, side)):
            with scoring_mode(block, "running"), exact_matmul():
                work.output.write(i + 1, side, j, run_batch(block, batch))
    block_weights = [
        BlockWeight(name, mask.numel(), int(mask.sum()), *errors.get(name, (None, None)))
        for name, mask in masks.items()
    ]
    work.output.finish(i, block_weights, tensors)
    work.network.free_block(i)
    return block_weights


def _cut_and_repaired(
    work: _Work, i: int, dense: nn.Module
) -> tuple[nn.Module, dict[str, Tensor], dict[str, tuple[float | None, float | None]]]:
    """The pruned block, its masks, and the errors of its repaired layers, before and after.

    The weights of experts that saw too few tokens stay as they are.
    """
    options, states = work.options, work.states(i, "dense")
    task = task_of(dense, _StateLoader(states), scoring=options.scoring, seed=options.seed)
    ranking = rank(task, options, statements=checked_method(options).uses_sensitivities)
    sparse = cut(ranking, budget_for(options, task.weights), seed=options.seed)
    if not work.repair:
        return sparse.model, sparse.masks, {}
    spared = spared_by_name(ranking, sparse.masks)
    fit = fit_block(
        dense,
        {name: mask & ~spared[name] if name in spared else mask for name, mask in sparse.masks.items()},
        replace(work.split, batches=states),
        work.states(i, "pruned"),
        pattern=None if options.pattern is None else pattern_of(options.pattern),
        follows=i > 0,
        chunk_bytes=chunk_of(options.scoring.chunk_bytes, work.network.device),
    )
    masks = restore_spared(fit.model, dense, fit.masks, spared)
    return fit.model, masks, {layer.name: (layer.error_before, layer.error) for layer in fit.layers}


def _file(i: int) -> str:
    return f"block-{i:05d}.safetensors"


@dataclass(frozen=True)
class _StoredStates(Sequence[Batch]):
    """The batches as a block receives them; each is read from its file when it is needed."""

    output: _OutputFolder
    i: int
    side: str
    batches: Sequence[Batch]
    device: torch.device

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, j: Any) -> Any:
        if not 0 <= j < len(self):
            raise IndexError(j)
        state = self.output.read(self.i, self.side, j).to(self.device)
        return replace(self.batches[j], args=(state,), kwargs={}, labels=None, real_BT=None)


@dataclass(frozen=True)
class _StateLoader:
    """The hidden states alone, as data that can be read again."""

    states: _StoredStates

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[Tensor]:
        return (batch.args[0] for batch in self.states)


class _OutputFolder:
    """The output folder: a journal of finished blocks, and the hidden states before the next block."""

    def __init__(self, folder: Path, task: str) -> None:
        self.folder, self.states_folder, self.task = folder, child_path(folder, WORK), task

    def begin(self) -> int:
        """The number of finished blocks; OptionError if the folder holds anything else."""
        make_folder(self.folder)
        path = child_path(self.folder, JOURNAL)
        if not path.is_file() and any(path.name != WORK for path in self.folder.iterdir()):
            raise OptionError(f"{self.folder} holds other files", fix="give a new folder", option="out")
        journal = read_json(path) if path.is_file() else {"finished": 0}
        if journal["finished"] == 0:
            shutil.rmtree(self.states_folder, ignore_errors=True)
            make_folder(self.states_folder)
            write_json(self.folder / JOURNAL, {"task": self.task, "finished": 0, "weights": [], "file_of": {}})
            return 0
        if journal["task"] != self.task:
            raise OptionError(
                f"{self.folder} was started with other options, weights or inputs",
                fix="give the same ones to go on, or another folder",
                option="out",
            )
        return int(journal["finished"])

    def finish(self, i: int, done: Sequence[BlockWeight], names: Iterable[str]) -> None:
        """Marks block i as finished, with these tensors in its file, and deletes the states before it."""
        before = self.journal()
        weights = [*before["weights"], *map(asdict, done)]
        file_of = before["file_of"] | dict.fromkeys(names, _file(i))
        values = {"task": self.task, "finished": i + 1, "weights": weights, "file_of": file_of}
        write_json(self.folder / JOURNAL, values)
        shutil.rmtree(self.states_folder / str(i), ignore_errors=True)

    def journal(self) -> dict[str, Any]:
        """The journal so far."""
        values: dict[str, Any] = read_json(self.folder / JOURNAL)
        return values

    def end(self, source: Path) -> None:
        """Copies the files that belong to the network (config, tokenizer), and deletes the states."""
        for path in companion_files(source, *CONFIGS):
            if not os.path.lexists(self.folder / path.name):  # a link that leads nowhere would be written through
                shutil.copyfile(path, self.folder / path.name)
        shutil.rmtree(self.states_folder, ignore_errors=True)

    def write(self, i: int, side: str, j: int, state: Tensor) -> None:
        """Writes the hidden states of batch j before block i."""
        make_folder(self.states_folder / str(i))
        save_state(self.states_folder / str(i), f"{side}-{j}", {"state": state}, {})

    def read(self, i: int, side: str, j: int) -> Tensor:
        state: Tensor = load_state(self.states_folder / str(i), f"{side}-{j}")[0]["state"]
        return state


def _task_hash(
    options: PruneOptions, repair: bool, source: ShardedWeights, blocks: Blocks, batches: Sequence[Batch]
) -> str:
    """A hash of options, weight files and points: only a run with the same hash may resume."""
    files = {file: file_hash(source.folder / file) for file in sorted({*source.file_of.values()})}
    described = json.dumps([_described(options), repair, blocks.names, files], sort_keys=True)
    return sha256_of(described.encode(), *(key for batch in batches for key in draw_keys_of(batch)))


def _described(options: PruneOptions) -> str:
    """All options as text, without memory addresses of functions, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(options))
