"""Training with masks held: batches, schedules, one step, the loop."""

from sipp.experiments.training.feed import Feed
from sipp.experiments.training.loop import Hyper, MaskChanges, TrainState, evaluate, new_state, train
from sipp.experiments.training.schedule import Schedule, rate

__all__ = ["Feed", "Hyper", "MaskChanges", "Schedule", "TrainState", "evaluate", "new_state", "rate", "train"]
