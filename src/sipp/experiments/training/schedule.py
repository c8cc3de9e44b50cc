"""The learning rate: a pure function of how many epochs (and parts of one) have passed.

The paper's tables give a nominal rate, a warm-up in epochs and a decay written factor@{epochs}. Retraining repeats the
whole schedule, warm-up and all (learning-rate rewinding), unless a recipe gives it one of its own (`retrain`).
"""

from __future__ import annotations

from bisect import bisect_right

from sipp.experiments.recipes.schema import Training


def learning_rate(hyper: Training, epoch: float) -> float:
    """The rate after `epoch` epochs, a number with a fraction: 2.5 is the middle of the third epoch.

    It rises linearly from 0 over the warm-up and is multiplied by the decay's factor at each milestone, or every so
    many epochs. Epochs count from the start of training, the warm-up included.
    """
    rise = 1.0 if hyper.warmup_epochs == 0 else min(1.0, epoch / hyper.warmup_epochs)
    decay = hyper.decay
    n_decays = int(epoch // decay.every) if decay.every is not None else bisect_right(decay.milestones or (), epoch)
    return hyper.rate * rise * decay.factor**n_decays
