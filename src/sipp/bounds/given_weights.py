"""A ranking of the dense network and other weights in, everything that is promised about those out (T17)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sipp.bounds.statements import state
from sipp.inputs.network_hash import tensors_of
from sipp.pruning.cutting import before_cut
from sipp.pruning.result import Pruned, Ranking
from sipp.pruning.sparse_rows import SparseRows, given_rows
from sipp.records import to_rows


def judge(ranking: Ranking, given: nn.Module, masks: Mapping[str, Tensor], seed: int) -> Pruned:
    """The record of a network whose weights are given: what holds for them, whoever chose or fitted them (T17)."""
    assert ranking.scores is not None
    dense, rows = before_cut(ranking).dense, list[SparseRows]()
    shown = {}
    for weight, layer, dense_FK in zip(ranking.weights, ranking.scores.layers, dense):
        parameter = given.get_parameter(weight.name).detach()
        shown[weight.name] = masks[weight.name].bool() if weight.name in masks else parameter != 0
        values_FK, mask_FK = (to_rows(weight, tensor).cpu() for tensor in (parameter, shown[weight.name]))
        sensitivity_FK = layer.sensitivity_FK.cpu()
        rows.append(given_rows(dense_FK, values_FK, mask_FK, sensitivity_FK, c_constant=ranking.constants.c_constant))
    kept = sum(int(row.mask_FK.sum()) for row in rows)
    others = _other_differences(ranking, given)
    return state(ranking, rows, dense, given, shown, budget=kept, seed=seed, others=others)


def _other_differences(ranking: Ranking, given: nn.Module) -> list[str]:
    """Names of tensors that are no pruned weight and differ: statements about the network do not know of them."""
    chosen = {name for weight in ranking.weights for name in (weight.name, *weight.aliases)}
    ours, theirs = tensors_of(ranking.model), tensors_of(given)
    return [
        name for name, value in ours.items() if name not in chosen and not torch.equal(value, theirs[name].to(value))
    ]
