"""`hold` takes its masks from every result that has some, and from the zeros of a network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sipp
from sipp.errors import ModelError, OptionError
from sipp.pruning.masking import masks_of, release
from sipp.results.pruned_to import PrunedTo


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 2))


def pruned() -> sipp.Pruned:
    return sipp.prune(net(), None, keep=0.3, method="magnitude")


def of_prune_to(folder: Path) -> Any:
    x = torch.rand(300, 7)
    return sipp.prune_to(net(), x[:100], x[100:], epsilon=2.0, method="magnitude", progress=False)


def of_gradual(folder: Path) -> Any:
    return sipp.gradual(net(), lambda step: None, None, keep=0.3, steps=10, method="magnitude", progress=False)


def of_file(folder: Path) -> Any:
    sipp.save(pruned(), folder / "net.safetensors")
    return sipp.inspect(folder / "net.safetensors")


def of_own_masks(folder: Path) -> Any:
    return sipp.assess(net(), {"0.weight": torch.rand(9, 7) > 0.5}, torch.rand(100, 7), progress=False)


@pytest.mark.parametrize("made", [of_prune_to, of_gradual, of_file, of_own_masks])
def test_every_result_with_masks_is_held(made: Callable[[Path], Any], tmp_path: Path) -> None:
    result = made(tmp_path)
    masks = result.pruned.masks if isinstance(result, PrunedTo) else result.masks
    assert any(not bool(mask.all()) for mask in masks.values())
    held = net()
    sipp.hold(held, result)
    assert masks_of(held).keys() == masks.keys()
    assert all(bool((held.get_parameter(name)[~mask] == 0).all()) for name, mask in masks.items())


def test_the_zeros_of_a_network_are_its_masks() -> None:
    found = pruned()
    sipp.hold(found.model, found.model)
    assert masks_of(found.model).keys() == found.masks.keys()
    assert all(torch.equal(mask, masks_of(found.model)[name]) for name, mask in found.masks.items())
    release(found.model)
    with torch.no_grad():
        found.model.get_parameter("2.weight").zero_()  # as a layer may begin: it is not held at zero
    sipp.hold(found.model, found.model)
    assert masks_of(found.model).keys() == {"0.weight"}


def test_what_has_no_masks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not pruned"):
        sipp.hold(net(), net())
    sipp.save(net(), tmp_path / "dense.safetensors")
    with pytest.raises(OptionError, match="contains no masks"):
        sipp.hold(net(), sipp.inspect(tmp_path / "dense.safetensors"))
    with pytest.raises(OptionError, match=r"mask of '0.weight' is not a bool tensor"):
        sipp.hold(net(), net().state_dict())
