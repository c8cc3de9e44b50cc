"""Learning rates: a pure function of how many epochs (and parts of one) have passed.

The paper's tables give a nominal rate, a warm-up in epochs and a decay written factor@{epochs}. Retraining repeats the
whole schedule, warm-up and all (learning-rate rewinding), unless a recipe gives it one of its own (`retrain`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from sipp.errors import OptionError


@dataclass(frozen=True)
class Schedule:
    """A rate that rises linearly from 0 to `peak` over the warm-up and is multiplied by `factor` at each decay.

    Decays happen at `milestones` (0.1@{91, 136}), or every `every` epochs (0.5@{30, ...}); one of the two is empty.
    Epochs count from the start of training, the warm-up included.
    """

    peak: float
    warmup_epochs: float = 0.0
    factor: float = 1.0
    milestones: tuple[int, ...] = ()
    every: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise OptionError(f"peak={self.peak!r} must be a positive learning rate")
        if not (math.isfinite(self.warmup_epochs) and self.warmup_epochs >= 0):
            raise OptionError(f"warmup_epochs={self.warmup_epochs!r} must not be negative")
        if not (math.isfinite(self.factor) and 0 < self.factor <= 1):
            raise OptionError(f"factor={self.factor!r} must lie in (0, 1]: what a decay leaves of the rate")
        if self.milestones and self.every is not None:
            raise OptionError("give milestones or every, not both")
        if any(b <= a for a, b in zip((0, *self.milestones), self.milestones)):
            raise OptionError(f"milestones={self.milestones!r} must be positive and strictly rising")
        if self.every is not None and self.every < 1:
            raise OptionError(f"every={self.every!r} must be at least one epoch")


def rate(schedule: Schedule, epoch: float) -> float:
    """The learning rate after `epoch` epochs, a number with a fraction: 2.5 is the middle of the third epoch."""
    if not epoch >= 0:
        raise OptionError(f"epoch={epoch!r} must not be negative")
    rise = 1.0 if schedule.warmup_epochs == 0 else min(1.0, epoch / schedule.warmup_epochs)
    if schedule.every is not None:
        n_decays = int(epoch // schedule.every)
    else:
        n_decays = bisect_right(schedule.milestones, epoch)
    return schedule.peak * rise * schedule.factor**n_decays
