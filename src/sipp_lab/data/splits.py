"""Splits a data set into train, calibration, holdout and test items: disjoint, seeded, identified by a hash.

Calibration (S in T3, T4) and holdout (V in T14) come from the training part, never from the test set, so certificates
never use the items on which the final accuracy is measured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.errors import OptionError
from sipp.files import sha256_of
from sipp_lab.data.imagefolder import FolderIndex
from sipp_lab.data.imageset import ImageSet
from sipp_lab.seeds import generator_for

PARTS = ("train", "calibration", "holdout", "test")


@dataclass(frozen=True, eq=False)
class Splits:
    """Sorted item numbers of the four parts, and a hash of the data."""

    train: Tensor
    calibration: Tensor
    holdout: Tensor
    test: Tensor
    n_train_part: int
    seed: int
    content_hash: str

    @property
    def digest(self) -> str:
        """SHA-256 of the data's hash, the seed and all four parts: equal digests mean equal experiments."""
        parts: list[bytes | memoryview] = [f"{self.content_hash} {self.seed} {self.n_train_part}".encode()]
        for name in PARTS:
            items = getattr(self, name)
            parts.append(f"{name} {items.numel()}".encode())
            parts.append(items.cpu().contiguous().numpy().data)
        return sha256_of(*parts)


def n_left(n_items: int, *, n_calibration: int, n_holdout: int) -> int:
    """How many of the training part's items are left to train on; OptionError if there are none."""
    if n_calibration < 0 or n_holdout < 0:
        raise OptionError(f"n_calibration={n_calibration} and n_holdout={n_holdout} must not be negative")
    n_taken = n_calibration + n_holdout
    if n_taken >= n_items:
        raise OptionError(
            f"n_calibration + n_holdout = {n_taken} leaves nothing to train on: the training part has {n_items} items"
        )
    return n_items - n_taken


def split_images(data: ImageSet | FolderIndex, *, n_calibration: int, n_holdout: int, seed: int = 0) -> Splits:
    """Splits the training part at random, by the seed; the test part is the test set."""
    n_train = n_left(data.n_train, n_calibration=n_calibration, n_holdout=n_holdout)
    # A local generator, so that the recorded seed alone determines the split.
    order = torch.randperm(data.n_train, generator=torch.Generator().manual_seed(seed))
    calibration, holdout, train = order.split([n_calibration, n_holdout, n_train])
    return Splits(
        train=train.sort().values,
        calibration=calibration.sort().values,
        holdout=holdout.sort().values,
        test=torch.arange(data.n_train, data.n_train + data.n_test),
        n_train_part=data.n_train,
        seed=seed,
        content_hash=data.content_hash,
    )


def epoch_order(items: Tensor, *, seed: int, epoch: int) -> Tensor:
    """`items` shuffled for one epoch; depends only on (seed, epoch), so a resumed run sees the same batches."""
    generator = generator_for(f"epoch order {seed} {epoch}")
    return items[torch.randperm(len(items), generator=generator).to(items.device)]
