"""Training with masks held, the two pipelines of the paper, and runs that can be stopped and resumed."""

from sipp.experiments.training.feed import Feed
from sipp.experiments.training.loop import Accuracy, EpochRow, Hyper, TrainState, evaluate, new_state, train
from sipp.experiments.training.schedule import Schedule, rate

__all__ = ["Accuracy", "EpochRow", "Feed", "Hyper", "Schedule", "TrainState", "evaluate", "new_state", "rate", "train"]
