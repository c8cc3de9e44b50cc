"""What all stages of a run share, and the networks they pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sipp_lab.nets import build
from sipp_lab.own_code import own_network
from sipp_lab.parallel.processes import ALONE, Processes
from sipp_lab.recipes import Recipe
from sipp_lab.recipes.schema import Training
from sipp_lab.runs.records import Stage
from sipp_lab.training.feed import Feed
from sipp_lab.training.loop import TrainState

MODEL, MASK = "model.", "mask."  # prefixes of a network's tensors in a file


@dataclass(frozen=True)
class Network:
    """A network on the CPU: its state_dict, and the masks of its prunable weights (empty if dense)."""

    state: dict[str, Tensor]
    masks: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, masks: Mapping[str, Tensor]) -> Network:
        """A copy of the model as it is now."""
        state = {key: tensor.detach().cpu().clone() for key, tensor in model.state_dict().items()}
        return cls(state, {name: mask.cpu() for name, mask in masks.items()})

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Network:
        """The inverse of `tensors`."""
        state, masks = (
            {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            for prefix in (MODEL, MASK)
        )
        return cls(state, masks)

    def tensors(self) -> dict[str, Tensor]:
        """State and masks in one dictionary, as they are saved."""
        states = {MODEL + key: tensor for key, tensor in self.state.items()}
        return {**states, **{MASK + key: tensor for key, tensor in self.masks.items()}}


Prepared = tuple[Network, dict[str, Any]]  # the network that training starts from, and what to record about it


@dataclass(frozen=True)
class RunContext:
    """What all stages of a run share."""

    recipe: Recipe
    folder: Path  # of the run; locked
    feed: Feed
    checkpoint_seconds: float
    on_step: Callable[[Stage, TrainState], None] = lambda stage, state: None
    processes: Processes = ALONE

    def initial_network(self, seed: int) -> Network:
        """The initial network of a seed, the same for every method and level."""
        return Network.of(self._new_module(seed), {})

    def module_of(self, network: Network, hyper: Training) -> nn.Module:
        """The network as a module on the device, in the memory layout of this training."""
        model = self._new_module(0)
        model.load_state_dict(network.state)
        if hyper.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model.to(self.feed.device)

    def _new_module(self, seed: int) -> nn.Module:
        """Does not advance torch's global generator."""
        recipe = self.recipe
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if recipe.code.net is not None:
                return own_network(recipe.code.net)
            return build(recipe.net, n_classes=self.feed.data.n_classes, init=recipe.init)
