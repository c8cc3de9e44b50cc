"""A pipeline of the tests: the initial network is trained, and in the middle of that loses half of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sipp.results.bounds import NetworkBound
from sipp.results.jsonio import to_json
from sipp.results.pruned import Pruned, PrunedLayer
from sipp_lab.pipelines import Pipeline
from sipp_lab.runs.context import Network, Prepared, RunContext
from sipp_lab.runs.records import Stage
from sipp_lab.training.loop import MaskChanges, TrainState


def prepare(context: RunContext, stage: Stage, network: Network) -> Prepared:
    return Prepared(network, {})


def mask_changes(context: RunContext, stage: Stage, n_steps: int) -> MaskChanges:
    """Half of what is left goes after each half of what is left of the steps, as many times as the level says."""
    return MaskChanges(frozenset(n_steps - n_steps // 2**k for k in range(1, stage.level + 1)), halved)


def halved(step: int, state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Masks of the larger half of each weight that is left, and what is known of the network then."""
    masks, layers = {}, []
    for name, weight in state.model.named_parameters():
        if weight.dim() < 2:
            continue
        alive = state.masks.get(name, torch.ones(weight.shape, dtype=torch.bool, device="cpu"))
        sizes = torch.where(alive, weight.detach().abs().cpu(), -1.0).flatten()
        mask = torch.zeros(sizes.shape, dtype=torch.bool, device="cpu")
        mask[sizes.topk(int(alive.sum()) // 2).indices] = True
        masks[name] = mask.view(weight.shape)
        layers.append(
            PrunedLayer(
                name=name,
                layer_type="",
                n_rows=len(weight),
                fan_in=mask.numel() // len(weight),
                kept=int(mask.sum()),
                strategies={},
                dead_rows=0,
                eps=None,
                sign_complexity=None,
                kappa=None,
            )
        )
    kept = sum(layer.kept for layer in layers)
    facts = Pruned(
        layers=tuple(layers), guarantee=None,
        bound=NetworkBound.none("a method of the tests", None), method="magnitude",
        budget=kept, kept=kept, seed=0,
    )  # fmt: skip
    return masks, to_json({"pruned": facts, "path": [{"after_step": step, "keep": facts.keep}]})


PIPELINE = Pipeline(
    description="train, and lose half of the weights on the way",
    compared_with="nothing",
    metric="top1",
    prepare=prepare,
    mask_changes=mask_changes,
)
