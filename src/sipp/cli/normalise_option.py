"""The option --normalise: how image bytes become numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from sipp.cli.errors import CommandError, naming_option
from sipp_lab.data.transforms import MEAN, STD, normalise

FIX = "give imagenet, cifar10, none, or MEAN/STD for bytes x as (x / 255 - MEAN) / STD: 0.5,0.5,0.5/0.25,0.25,0.25"


@dataclass(frozen=True)
class Normalisation:
    """Bytes x become (x / 255 - mean) / std, per channel or with one value for all."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def words(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"bytes x as (x / 255 - mean) / std, mean {mean}, std {std}; --normalise gives others"

    def apply(self, images: Tensor) -> Tensor:
        """Normalises the images."""
        with naming_option("--normalise", "leave it out, or give one mean for each channel, or one for all"):
            return normalise(images, mean=self.mean, std=self.std)


USUAL = Normalisation(MEAN, STD)  # used to train published networks, also for CIFAR-10
NAMED = {
    "imagenet": USUAL,
    "cifar10": Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "none": Normalisation((0.0,), (1.0,)),
}


def normalisation_of(text: str | None) -> Normalisation | None:
    """Parses --normalise; None if it is not given."""
    if text is None or text in NAMED:
        return None if text is None else NAMED[text]
    try:
        mean, std = (tuple(float(part) for part in half.split(",")) for half in text.split("/"))
    except ValueError:
        raise CommandError(f"{text!r:.60} is not a normalisation", where=f"--normalise {text:.60}", fix=FIX) from None
    is_whole = all(map(math.isfinite, (*mean, *std))) and all(value > 0 for value in std)
    if len(mean) != len(std) or not is_whole:
        raise CommandError(
            f"{text!r:.60} must have as many positive deviations as finite means",
            where=f"--normalise {text:.60}",
            fix=FIX,
        )
    return Normalisation(mean, std)
