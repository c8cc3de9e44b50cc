"""Splits a data set into train, calibration, holdout and test items, and gives their batches.

Calibration (S in T3, T4) and holdout (V in T14) come from the training part, never from the test set, so certificates
never use the items on which the final accuracy is measured. A batch depends only on (seed, epoch, step), so a resumed
run sees the same batches without any saved random state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.errors import DataError, OptionError
from sipp.files import sha256_of
from sipp_lab.data.folder import FolderIndex
from sipp_lab.data.images import ALL, Batch, ImageSet, Share, normalise
from sipp_lab.seeds import generator_for

PARTS = ("train", "calibration", "holdout", "test")
NO_LABEL = -100  # torch's own ignore_index


@dataclass(frozen=True, eq=False)
class Splits:
    """Sorted item numbers of the four parts; `digest` is a SHA-256 of the data, the seed and all parts."""

    train: Tensor
    calibration: Tensor
    holdout: Tensor
    test: Tensor
    digest: str  # equal digests mean equal experiments


def n_left(n_items: int, *, n_calibration: int, n_holdout: int) -> int:
    """How many of the training part's items are left to train on; OptionError if there are none."""
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
    calibration, holdout, train = (part.sort().values for part in order.split([n_calibration, n_holdout, n_train]))
    parts = (train, calibration, holdout, torch.arange(data.n_train, data.n_train + data.n_test))
    content: list[bytes | memoryview] = [f"{data.content_hash} {seed} {data.n_train}".encode()]
    for name, items in zip(PARTS, parts):
        content += [f"{name} {len(items)}".encode(), items.numpy().data]
    return Splits(*parts, digest=sha256_of(*content))


def epoch_order(items: Tensor, *, seed: int, epoch: int) -> Tensor:
    """`items` shuffled for one epoch."""
    return items[torch.randperm(len(items), generator=generator_for(f"epoch order {seed} {epoch}"))]


@dataclass(frozen=True, eq=False)
class Feed:
    """A data set with its splits, and the device of its batches."""

    data: ImageSet | FolderIndex
    splits: Splits
    device: torch.device

    def n_steps(self, batch_size: int) -> int:
        """Steps per epoch, including a short last batch."""
        return math.ceil(len(self.splits.train) / batch_size)

    def train_batches(
        self, batch_size: int, *, augment: bool, seed: int, epoch: int, share: Share = ALL
    ) -> Iterator[Batch]:
        """The batches of one epoch, in the order given by (seed, epoch); of several processes, its share of each.

        If a short last batch has no item for a process, it gets one labelled `NO_LABEL`, which the loss ignores, so
        that all processes make the same number of steps.
        """
        if not len(self.splits.train):
            raise DataError("there is nothing to train on: the training split is empty")
        chunks = epoch_order(self.splits.train, seed=seed, epoch=epoch).split(batch_size)
        found = self.data.batches(chunks, augment=(seed, epoch) if augment else None, share=share)
        for chunk, (images, labels) in zip(chunks, found):
            is_padding = share[0] >= len(chunk)
            yield self._on_device(images, torch.full_like(labels, NO_LABEL) if is_padding else labels)

    def eval_batches(self, items: Tensor, *, batch_size: int | None = None) -> Iterator[Batch]:
        """The given items in their order, without augmentation: for evaluation and calibration."""
        for images, labels in self.data.batches(items.split(batch_size or self.data.EVAL_BATCH)):
            yield self._on_device(images, labels)

    def _on_device(self, images: Tensor, labels: Tensor) -> Batch:
        """The batch on the device, as float32 (bytes are normalised)."""
        images = images.to(self.device, non_blocking=True)
        if images.dtype == torch.uint8:
            images = normalise(images)
        return images, labels.to(self.device, non_blocking=True)
