"""Maps the weight names in files to those of a network, and back.

A checkpoint may lack the prefix of its network (`h.0` for `transformer.h.0`), use older names, or store each expert of
a mixture separately where the network has one tensor for all. transformers knows these rules and is asked for them
here; for other networks, names in files and network must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sipp.storage.block_by_block.sharded_weights import ShardedWeights

Rename = Callable[[str], tuple[str, Any, str]]  # of a file's name: the network's, what puts several together, its part


@dataclass(frozen=True)
class RenamedWeights:
    """Which tensors in files each tensor of a network is made of."""

    source: ShardedWeights
    model: Any  # an nn.Module; with converters one of transformers
    made_of: dict[str, list[tuple[str, str]]]  # by the network's name: names in the files, and their parts in it
    converters: dict[str, Any]  # of transformers, by the network's name; without one a tensor is as it is in its file

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads these tensors of the network, on the CPU."""
        wanted = list(names)
        read = self.source.read(file for name in wanted for file, _ in self.made_of[name])
        tensors: dict[str, Tensor] = {}
        for name in wanted:
            if name not in self.converters:
                ((file, _),) = self.made_of[name]
                tensors[name] = read.pop(file)
                continue
            converter = copy.deepcopy(self.converters[name])
            for file, part in self.made_of[name]:
                converter.add_tensor(name, file, part, read.pop(file))
            converted = converter.convert(name, model=self.model, config=self.model.config)
            tensors |= {key: tensor[0] if isinstance(tensor, list) else tensor for key, tensor in converted.items()}
        return tensors

    def as_in_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the network under the names of the files, or under its own if they cannot be split."""
        plain = {
            self.made_of[name][0][0]: tensor
            for name, tensor in tensors.items()
            if name in self.made_of and name not in self.converters
        }
        joined = {name: tensor for name, tensor in tensors.items() if name in self.converters}
        if joined:
            from transformers.core_model_loading import revert_weight_conversion

            apart = revert_weight_conversion(self.model, joined)
            joined = apart if apart.keys() <= self.source.file_of.keys() else joined
        return plain | {name: tensor.contiguous() for name, tensor in joined.items()}


def renamed_weights(model: nn.Module, source: ShardedWeights) -> RenamedWeights:
    """Maps the tensors in files to those of this network (which may be on the meta device); ignores all others."""
    own = model.state_dict()
    rename = _rules(model, own)
    made_of: dict[str, list[tuple[str, str]]] = {}
    converters: dict[str, Any] = {}
    for file in sorted(source.file_of, key=_in_order):
        name, converter, part = (file, None, "") if file in own else rename(file)
        if name not in own:
            continue
        made_of.setdefault(name, []).append((file, part))
        if converter is not None:  # which may make several of one
            first, *others = converter.target_patterns
            converters |= dict.fromkeys((name, *(name.replace(first, other) for other in others)), converter)
    return RenamedWeights(source, model, made_of, converters)


def _rules(model: Any, own: dict[str, Tensor]) -> Rename:
    """How transformers renames the tensors of a file."""
    prefix = getattr(model, "base_model_prefix", None)
    if not isinstance(prefix, str):
        return lambda file: (file, None, "")
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before 5.0 a prefix was all
        longer = f"{prefix}."
        return lambda file: (longer + file if longer + file in own else file.removeprefix(longer), None, "")
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_part = {part: converter for converter in converters for part in converter.source_patterns}

    def rename(file: str) -> tuple[str, Any, str]:
        name, part = rename_source_key(file, renamings, converters, prefix, own)
        return name, None if part is None else by_part[part], part or ""

    return rename


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Sorts expert 10 after expert 9."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
