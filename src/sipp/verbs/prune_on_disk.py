"""`prune_on_disk`: prunes a network that may be larger than memory, block by block, from files to files.

Memory holds one block, what its scores or its repair need, and one batch. The hidden states of all points between two
blocks are in files. A run that was stopped continues after the last finished block when it is started again.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, OptionError
from sipp.files import file_hash, sha256_of
from sipp.inputs.blocks import Blocks, Call, enter, same_arguments
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import AnyData, data_of
from sipp.inputs.point_hashes import point_hashes
from sipp.native.memory import give_back_large_pieces
from sipp.progress import progress_bar, progress_line
from sipp.pruning.cutting import budget_for, cut
from sipp.pruning.ranking import rank
from sipp.pruning.spared_rows import restore_spared, spared_by_name
from sipp.repairing.data_split import DataSplit, split_batches
from sipp.repairing.network_fit import fit_block
from sipp.results.batches import Batch
from sipp.results.checking import check_flag, check_path
from sipp.results.numerics import exact_matmul
from sipp.results.options import Method, PruneOptions, Scoring, pattern_of
from sipp.results.pruned_on_disk import BlockWeight, PrunedOnDisk
from sipp.scoring.methods import checked_method, refuse_fitted
from sipp.scoring.sensitivities import chunk_bytes_on
from sipp.scoring.task import task_of
from sipp.storage.block_by_block.block_folder import BlockFolder, file_of_block
from sipp.storage.block_by_block.network_in_files import NetworkInFiles
from sipp.storage.block_by_block.sharded_weights import ShardedWeights, sharded_weights, write_shard


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
    seed: int = 0,
    scoring: Scoring = Scoring(),
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> PrunedOnDisk:
    """Prunes a network whose weights are in files, one block after another, into the folder `out`.

    `model` has no weights (they are on the meta device: `with accelerate.init_empty_weights(): ...`); `weights` is the
    folder with its model.safetensors, or several files and their index. Each block keeps the share `keep`, or the
    pattern; everything before and after the blocks stays dense. The blocks are the list of modules with the most
    weights. `repair=True` finds the mask and the weights together and
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
    options = PruneOptions(keep=keep, pattern=pattern, method=method, seed=seed, scoring=scoring, statements=False)
    _check(model, options, repair=repair, progress=progress)
    give_back_large_pieces()
    source, target = sharded_weights(check_path("weights", weights, "model")), check_path("out", out, "pruned")
    device = _device(device)
    batches = tuple(data_of(data, device=device, seed=seed).batches())
    split = split_batches(batches) if repair else DataSplit(batches, len(batches), (), frozenset())
    network = NetworkInFiles(copy.deepcopy(model).eval(), source, device, None)
    network.load_rest()
    chain = network.find_blocks(split.batches[0])
    output = BlockFolder(target, _task_hash(options, repair, source, chain, split.batches))
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
    network.write_rest(target, journal["file_of"])
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
    network: NetworkInFiles, blocks: Blocks, batches: Sequence[Batch], output: BlockFolder | None
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

    network: NetworkInFiles
    blocks: Blocks
    calls: Sequence[Call]  # arguments beside the hidden state, by block
    split: DataSplit
    output: BlockFolder
    options: PruneOptions
    repair: bool

    def states(self, i: int, side: str) -> Sequence[Tensor]:
        """The hidden states of all batches before block i, in the dense or in the pruned network."""
        device, n_batches = self.network.device, len(self.split.batches)
        return _ReadOnDemand(n_batches, lambda j: self.output.read(i, side, j).to(device))

    def batches(self, i: int, side: str) -> Sequence[Batch]:
        """The batches as block i receives them."""
        given, states = self.split.batches, self.states(i, side)
        return _ReadOnDemand(
            len(given), lambda j: replace(given[j], args=(states[j],), kwargs={}, labels=None, real_BT=None)
        )


def _prune_block(work: _Work, i: int) -> list[BlockWeight]:
    """Prunes block i, writes its file and the states after it, and marks it as finished."""
    dense = _Block(work.blocks.names[i], work.network.load_block(i), work.blocks, work.calls[i])
    pruned, masks, errors = _cut_and_repaired(work, i, dense)
    tensors = work.network.weights.as_in_files(pruned.state_dict())
    write_shard(work.output.folder / file_of_block(i), tensors)
    sides = (("dense", dense), ("pruned", pruned)) if work.repair else (("dense", dense),)
    for side, block in sides if i + 1 < len(work.blocks.names) else ():
        for j, batch in enumerate(work.batches(i, side)):
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
    options = work.options
    task = task_of(dense, work.states(i, "dense"), scoring=options.scoring, seed=options.seed)
    ranking = rank(task, options, statements=checked_method(options).uses_sensitivities)
    network_cut = cut(ranking, budget_for(options, task.weights), seed=options.seed)
    if not work.repair:
        return network_cut.model, network_cut.masks, {}
    spared = spared_by_name(ranking, network_cut.masks)
    fit = fit_block(
        dense,
        {name: mask & ~spared[name] if name in spared else mask for name, mask in network_cut.masks.items()},
        replace(work.split, batches=work.batches(i, "dense")),
        work.batches(i, "pruned") if i > 0 else None,  # before the first block, both networks are the same
        pattern=None if options.pattern is None else pattern_of(options.pattern),
        chunk_bytes=chunk_bytes_on(options.scoring.chunk_bytes, work.network.device),
    )
    masks = restore_spared(fit.model, dense, fit.masks, spared)
    return fit.model, masks, {layer.name: (layer.error_before, layer.error_after) for layer in fit.layers}


@dataclass(frozen=True)
class _ReadOnDemand(Sequence[Any]):
    """A sequence whose items are read from files when they are needed."""

    n: int
    read: Callable[[int], Any]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, j: Any) -> Any:
        if not 0 <= j < self.n:
            raise IndexError(j)
        return self.read(j)


def _task_hash(
    options: PruneOptions, repair: bool, source: ShardedWeights, blocks: Blocks, batches: Sequence[Batch]
) -> str:
    """A hash of options, weight files and points: only a run with the same hash may resume."""
    files = {file: file_hash(source.folder / file) for file in sorted({*source.file_of.values()})}
    described = json.dumps([_described(options), repair, blocks.names, files], sort_keys=True)
    return sha256_of(described.encode(), *(key.encode() for batch in batches for key in point_hashes(batch)))


def _described(options: PruneOptions) -> str:
    """All options as text, without memory addresses of functions, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(options))
