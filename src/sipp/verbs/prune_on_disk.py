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

from sipp.errors import ModelError, OptionError
from sipp.files import sha256_of
from sipp.inputs import AnyData, Batch, Blocks, copy_of, data_of
from sipp.native import memory
from sipp.progress import progress_bar, progress_line
from sipp.pruning import budget_for, cut, rank
from sipp.repairing import DataSplit, Part, Side, repair_part, split_data
from sipp.results import BlockWeight, Method, PrunedOnDisk, PruneOptions, SeenInputs, check
from sipp.scoring import checked_method, task_of
from sipp.storage import BlockFolder, NetworkInFiles


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
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> PrunedOnDisk:
    """Prunes a network whose weights are in files, one block after another, into the folder `out`.

    `model` has no weights (they are on the meta device: `with accelerate.init_empty_weights(): ...`); `weights` is the
    folder with its model.safetensors, or several files and their index. Each block keeps the share `keep`, or the
    pattern; everything before and after the blocks stays dense. The blocks are the list of modules with the most
    weights. `repair=True` finds the mask and the weights together and makes up for the error of earlier blocks. Call it
    again with the same arguments to resume a stopped run.

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
    options = PruneOptions(keep=keep, pattern=pattern, method=method, statements=False)
    _check(model, options, repair=repair, progress=progress)
    memory.give_back_large_pieces()
    source, target = check.path("weights", weights, "model"), check.path("out", out, "pruned")
    device = _device(device)
    network = NetworkInFiles(copy.deepcopy(model).eval(), source, device)
    points = data_of(data, device=device)
    batches = () if repair else tuple(points.batches())
    split = (
        split_data(points) if repair else DataSplit(batches, len(batches), (), SeenInputs(frozenset(), is_all=False))
    )
    network.load_rest()
    chain = network.find_blocks(split.batches[0])
    output = BlockFolder(target, _task_hash(options, repair, network, chain, split.batches))
    finished = output.begin()
    work = _Work(network, chain, split, output, options, repair)
    n_blocks, began = len(chain.names), monotonic()
    with progress_bar("blocks", n_blocks - finished, shown=progress) as advance:
        for i in range(finished, n_blocks):
            line = f"{chain.names[i]} ({i + 1} of {n_blocks}): {_block_summary(_prune_block(work, i))}"
            progress_line(line, shown=progress, seconds=monotonic() - began)
            advance(1)
    journal = output.journal()
    network.write_rest(target, journal.file_of)
    output.end(source)
    return PrunedOnDisk(target, n_blocks, finished, sum(batch.n_points for batch in split.batches), journal.weights)


def _check(model: object, options: PruneOptions, *, repair: bool, progress: bool) -> None:
    """Raises for what cannot be pruned block by block."""
    check.flag("progress", progress)
    check.flag("repair", repair)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model must be an nn.Module, not a {type(model).__name__}",
            fix="build it on torch.device('meta'), without weights",
        )
    if (options.keep is None) == (options.pattern is None):
        raise OptionError("give exactly one of keep and pattern", fix="give keep=0.5 or pattern='2:4'")
    if "labels" in checked_method(options, masks_only="prune_on_disk fits only with repair=True").needs:
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


STATE = "sipp_state"  # the input that is a block's state, beside those of the network


class _FromState(nn.Module):
    """The network from the end of one block to the end of the next, as a model of the state and its own inputs.

    Only that block is a part of it, under its own name. A copy has a block of its own and shares all other weights.
    """

    def __init__(self, network: nn.Module, blocks: Blocks, part: Part) -> None:
        super().__init__()
        self._given = network, blocks, part
        place: nn.Module = self
        *outer, last = part.end.split(".")
        for name in outer:
            place.add_module(name, nn.Module())
            place = place.get_submodule(name)
        place.add_module(last, network.get_submodule(part.end))

    @property
    def network(self) -> nn.Module:
        """The whole network."""
        return self._given[0]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        network, blocks, part = self._given
        kept = None
        if part.finished:
            kept, args = (kwargs.pop(STATE), args) if STATE in kwargs else (args[0], args[1:])
            kept = blocks.as_output(kept)
        return blocks.state_of(part.run(network, kept, lambda: network(*args, **kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> _FromState:
        network, blocks, part = self._given
        own = {id(tensor) for tensor in self.state_dict(keep_vars=True).values()}
        every = (*network.parameters(), *network.buffers())
        shared = {id(tensor): tensor for tensor in every if id(tensor) not in own}
        return _FromState(copy.deepcopy(network, shared), blocks, part)


@dataclass(frozen=True)
class _States:
    """The outputs of the blocks of one network, in files."""

    output: BlockFolder
    side: str
    blocks: Blocks

    def read(self, part: int, batch: int) -> Any:
        return self.blocks.as_output(self.output.read(part, self.side, batch))

    def write(self, part: int, batch: int, output: Any) -> None:
        self.output.write(part, self.side, batch, self.blocks.state_of(output))


@dataclass(frozen=True)
class _Work:
    """The files, data and options that the pruning of every block needs."""

    network: NetworkInFiles
    blocks: Blocks
    split: DataSplit
    output: BlockFolder
    options: PruneOptions
    repair: bool

    def batches(self, i: int) -> Sequence[Batch]:
        """The batches as block i receives them in the dense network: beside the state, the network's own inputs."""
        given, states = self.split.batches, _States(self.output, "dense", self.blocks)
        if i == 0:
            return given

        def with_state(j: int) -> Batch:
            batch, state = given[j], self.blocks.state_of(states.read(i, j)).to(self.network.device)
            if batch.kwargs:
                return replace(batch, kwargs={STATE: state, **batch.kwargs})
            return replace(batch, args=(state, *batch.args))

        return _ReadOnDemand(len(given), with_state)

    def side(self, name: str, model: _FromState) -> Side:
        """The dense or the pruned network on all batches."""
        return Side(model.network, self.split.batches, _States(self.output, name, self.blocks))


def _prune_block(work: _Work, i: int) -> list[BlockWeight]:
    """Prunes block i, writes its file and the states after it, and marks it as finished."""
    names = work.blocks.names
    part = Part(i, names[:i], names[i], groups=())
    work.network.load_block(i)
    dense = _FromState(work.network.model, work.blocks, part)
    pruned, masks, errors = _cut_and_repaired(work, part, dense)
    tensors = work.network.weights.as_in_files(pruned.state_dict())
    for name, model in (("dense", dense), ("pruned", pruned)) if i + 1 < len(names) else ():
        if work.repair or name == "dense":
            work.side(name, model).pass_on(part)
    block_weights = [
        BlockWeight(name, mask.numel(), int(mask.sum()), *errors.get(name, (None, None)))
        for name, mask in masks.items()
    ]
    work.output.finish(i, block_weights, tensors)
    work.network.free_block(i)
    return block_weights


def _cut_and_repaired(
    work: _Work, part: Part, dense: _FromState
) -> tuple[_FromState, dict[str, Tensor], dict[str, tuple[float | None, float | None]]]:
    """The pruned block, its masks, and the errors of its repaired layers, before and after."""
    options, batches = work.options, work.batches(part.number)
    data = _ReadOnDemand(len(batches), lambda j: batches[j].as_given)
    task = task_of(dense, data)
    ranking = rank(task, options)
    network_cut = cut(ranking, budget_for(options, task.weights), seed=options.seed)
    pruned: Any = network_cut.model
    if not work.repair:
        return pruned, network_cut.masks, {}
    pruned = copy_of(dense)  # of the dense values: a search begins with them
    ours, theirs = (work.side(name, model) for name, model in (("dense", dense), ("pruned", pruned)))
    n_fit_batches, pattern = work.split.n_fit_batches, ranking.pattern
    masks, layers = repair_part(
        part, (dense, batches[0]), ours, theirs, network_cut.masks, n_fit_batches, pattern=pattern
    )
    return pruned, masks, {layer.name: (layer.error_before, layer.error_after) for layer in layers}


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
    options: PruneOptions, repair: bool, network: NetworkInFiles, blocks: Blocks, batches: Sequence[Batch]
) -> str:
    """A hash of options, weight files and inputs: only a run with the same hash may resume."""
    described = json.dumps([_described(options), repair, blocks.names, network.source.hashes()], sort_keys=True)
    return sha256_of(described.encode(), *(found.encode() for batch in batches for found in batch.hashes()))


def _described(options: PruneOptions) -> str:
    """All options as text, without memory addresses of functions, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(options))
