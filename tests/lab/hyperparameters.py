"""Hyperparameters for tests of training: as a recipe has them, most of them left out."""

from typing import Any

from sipp_lab.recipes.schema import Decay, Training


def hyperparameters(
    epochs: int,
    batch_size: int,
    rate: float,
    *,
    warmup_epochs: float = 0.0,
    factor: float = 1.0,
    milestones: tuple[int, ...] | None = (),
    every: int | None = None,
    **others: Any,
) -> Training:
    """SGD with a momentum of 0.9 and a constant rate, unless told otherwise."""
    decay = Decay(factor=factor, milestones=milestones if every is None else None, every=every)
    given = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0, "augment": False, **others}
    if given["optimizer"] == "adam":
        given["momentum"] = None
    return Training(epochs=epochs, batch_size=batch_size, rate=rate, warmup_epochs=warmup_epochs, decay=decay, **given)
