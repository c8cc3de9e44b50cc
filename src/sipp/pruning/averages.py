"""Keeps pruned weights at zero in averages of a network (EMA, SWA), or raises an error.

An average is a copy of the network. One that was made before the masks is dense, and torch's `AveragedModel` does not
say which network it averages. So every `AveragedModel` in the process whose shapes fit is watched.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim.swa_utils import AveragedModel

from sipp.errors import ModelError, OptionError
from sipp.pruning.masking import masks_of

Average = nn.Module | Sequence[nn.Module] | None
DENSE_AVERAGE = (
    "an AveragedModel of this network was made before its masks: pruned weights would come back in the average"
)
FIX = "give it to gradual as average=, or make it afterwards; average=() where it averages another network"


@dataclass(frozen=True)
class WatchedAverage:
    """An average that was not passed as `average=`, and how often it had been updated when the masks were made."""

    average: AveragedModel
    n_updates: int


def checked_averages(model: nn.Module, average: Average) -> list[nn.Module]:
    """The averages that were passed, each checked to be a copy of the model whose masks can be held."""
    if not isinstance(average, nn.Module | list | tuple | None):
        raise OptionError(f"average is a {type(average).__name__}", fix="give an AveragedModel, or a list of them")
    averages = [] if average is None else [average] if isinstance(average, nn.Module) else list(average)
    for copied in averages:
        if not isinstance(copied, nn.Module) or copied is model or _shapes(copied) != _shapes(model):
            raise OptionError(
                f"average is a {type(copied).__name__} that is not a copy of the model", fix="make it from the model"
            )
        if masks_of(copied):
            raise ModelError("masks of the average are held, and would be released", fix="release(average) first")
        if getattr(copied, "use_buffers", False):
            raise OptionError(
                "the average includes buffers, and held masks are buffers",
                fix="make it with use_buffers=False, and call torch.optim.swa_utils.update_bn at the end",
            )
    return averages


def averages_to_watch(model: nn.Module, average: Average) -> list[WatchedAverage]:
    """Averages in this process that may be of this model; none if the caller passed `average=`."""
    if average is not None:
        return []
    objects = gc.get_objects()
    # type(item), not isinstance: an object may override __class__; a process has far fewer types than objects
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, AveragedModel)}
    averages = [item for item in objects if type(item) in types] if types else []
    alike = [average for average in averages if average is not model and _shapes(average) == _shapes(model)]
    return [WatchedAverage(average, int(average.n_averaged)) for average in alike]


def refuse_updated(watched: Sequence[WatchedAverage]) -> None:
    """Raises if a watched average was updated after the masks were made."""
    if any(int(watch.average.n_averaged) != watch.n_updates for watch in watched):
        raise ModelError(DENSE_AVERAGE, fix=FIX)


def refuse_failed(watched: Sequence[WatchedAverage], error: Exception) -> None:
    """Raises if the error came from a watched average: torch pairs its buffers with the masks, and fails."""
    places = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(place is watch.average for place in places for watch in watched):
        raise ModelError(DENSE_AVERAGE, fix=FIX) from error


def _shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.parameters()]
