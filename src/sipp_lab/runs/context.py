"""What all stages of a run share: its data, its device, and the networks they pass on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import sipp
from sipp.errors import OptionError
from sipp_lab.data.feed import Feed, split_images
from sipp_lab.data.sets import load_set
from sipp_lab.nets import build
from sipp_lab.own_code import digest_of, own_images, own_network
from sipp_lab.recipes import Recipe, is_own
from sipp_lab.recipes.arms import arm_of
from sipp_lab.recipes.schema import Training
from sipp_lab.runs.folder import code_version

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


@dataclass(frozen=True)
class RunContext:
    """What all stages of a run share."""

    recipe: Recipe
    folder: Path  # of the run; locked
    feed: Feed
    checkpoint_seconds: float
    advance: Callable[[int], None] = lambda n_epochs: None  # shows progress

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
            if is_own(recipe.net):
                return own_network(recipe.net)
            return build(recipe.net, n_classes=self.feed.data.n_classes, init=recipe.init)


def load_feed(recipe: Recipe, root: Path, device: torch.device) -> Feed:
    """Loads the recipe's data from `root` and splits it; images in memory are moved to the device."""
    spec = recipe.data
    data = own_images(spec.name) if is_own(spec.name) else load_set(spec.name, root)
    splits = split_images(data, n_calibration=spec.n_calibration, n_holdout=spec.n_holdout)
    return Feed(data.to(device), splits, device)


def code_version_of(recipe: Recipe) -> str:
    """The code behind a run's results: this package, torch, and the user's own network, data and scores if any."""
    known, own = sipp.methods(), [name for name in (recipe.net, recipe.data.name) if is_own(name)]
    if is_own(recipe.net):
        with torch.random.fork_rng(devices=[]):
            own_network(recipe.net)  # fails early if it cannot be built
    rows = [known[arm_of(label)[0]] for label in recipe.prune.methods]
    scores = [digest_of(row.name, row.score) for row in rows if row.is_own]
    return ", ".join([code_version(), *(digest_of(name) for name in own), *scores])


def device_named(name: str) -> torch.device:
    """The device "cpu", "cuda", or "auto": a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise OptionError("torch finds no CUDA device on this machine", fix="use device cpu, or leave it out")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


@contextmanager
def torch_settings(n_threads: int | None) -> Iterator[None]:
    """torch with this number of threads (None: its own choice), and cuDNN trying its kernels, inside the block."""
    n_before, tries = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.set_num_threads(n_threads or n_before)
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_num_threads(n_before)
        torch.backends.cudnn.benchmark = tries
