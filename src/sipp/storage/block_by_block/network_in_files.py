"""A network without weights, and the files from which they are read, one block at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sipp.errors import ModelError
from sipp.inputs import Batch, Blocks, trace_layers
from sipp.storage.block_by_block.renamed_weights import renamed_weights
from sipp.storage.block_by_block.sharded_weights import sharded_weights, write_index, write_shard

N_PROBED = 3  # first blocks, run to see how blocks pass their hidden state on
REST = "rest.safetensors"


class NetworkInFiles:
    """A network on the meta device, and the files from which its weights are read, one block at a time."""

    def __init__(self, model: nn.Module, folder: Path, device: torch.device) -> None:
        self.model, self.source, self.device = model, sharded_weights(folder), device
        self.weights = renamed_weights(model, self.source)
        self.list_name = _largest_list(model)
        self.names = tuple(f"{self.list_name}.{name}" for name in model.get_submodule(self.list_name)._modules)

    def load_rest(self) -> None:
        """Loads the weights outside the blocks."""
        inside = tuple(f"{name}." for name in self.names)
        self._load([name for name in self.weights.made_of if not name.startswith(inside)])
        tie = getattr(self.model, "tie_weights", None)
        if callable(tie):
            tie()
        empty = [name for name, p in self.model.named_parameters() if p.is_meta and not name.startswith(inside)]
        if empty:
            raise ModelError(f"the files contain no {empty[0]}", where=self.source.folder)
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
            raise ModelError(f"the files contain no {self.names[i]}.{empty[0]}", where=self.source.folder)
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
            blocks = trace_layers(self.model, (), batch).blocks
        finally:
            setattr(owner, local, whole)
            for i in range(n_first):
                self.free_block(i)
        if blocks is None or blocks.names != self.names[:n_first]:
            raise ModelError(
                f"the blocks in {self.list_name} do not follow each other: a block must take the previous one's output",
                fix="prune it whole, with sipp.prune",
            )
        return replace(blocks, names=self.names)

    def write_rest(self, folder: Path, file_of: Mapping[str, str]) -> None:
        """Writes the weights outside the blocks unchanged, and the index; `file_of` lists the tensors of blocks."""
        inside = tuple(f"{name}." for name in self.names)
        in_blocks = {file for name, of in self.weights.made_of.items() if name.startswith(inside) for file, _ in of}
        rest = [name for name in self.source.file_of if name not in in_blocks]
        write_shard(folder / REST, self.source.read(rest))
        n_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        write_index(folder, {**file_of, **dict.fromkeys(rest, REST)}, n_bytes)

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
