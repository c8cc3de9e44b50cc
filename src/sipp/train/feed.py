"""Batches for training, evaluation and calibration, from images in memory or from folders of image files.

What a batch holds is a function of (seed, epoch, step) alone: the order comes from `epoch_order`, the augmentation from
a generator made for that one step. So nothing random has to be saved for a resumed run to see the same batches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.data import FolderBatches, FolderIndex, ImageSet, Splits, augment, epoch_order, normalise
from sipp.errors import DataError

Batch = tuple[Tensor, Tensor]

EVAL_BATCH = 1000  # images at once where no gradient is kept; for image files 256, they are 49 times larger
FOLDER_EVAL_BATCH = 256


@dataclass(frozen=True, eq=False)
class Feed:
    """A data set with its splits, where its batches go to, and how many processes decode image files."""

    source: ImageSet | FolderIndex
    splits: Splits
    n_classes: int
    device: torch.device
    n_workers: int = 0
    channels_last: bool = False


def step_seed(seed: int, epoch: int, step: int) -> int:
    """The seed of everything random in one training step."""
    return int.from_bytes(hashlib.sha256(f"step {seed} {epoch} {step}".encode()).digest()[:8], "big") >> 1


def n_steps(feed: Feed, batch_size: int) -> int:
    """The steps of one epoch; the last batch may be short, no item is left out."""
    return math.ceil(len(feed.splits.train) / batch_size)


def train_batches(
    feed: Feed, *, seed: int, epoch: int, batch_size: int, start: int = 0, augmented: bool
) -> Iterator[tuple[int, Batch]]:
    """(step, batch) of one epoch from step `start` on, in the order of (seed, epoch)."""
    if not len(feed.splits.train):
        raise DataError("there is nothing to train on: the training split is empty")
    order = epoch_order(feed.splits.train, seed=seed, epoch=epoch)[start * batch_size :]
    if isinstance(feed.source, FolderIndex):
        # Cropping and flipping happen while decoding; without augmentation the centre is taken, as for the test set.
        mode = "train" if augmented else "val"
        loaded = FolderBatches(feed.source, order, mode, batch_size, feed.n_workers, seed, epoch)  # type: ignore[arg-type]
        for offset, (images, labels) in enumerate(loaded):
            yield start + offset, _ready(feed, images, labels)
        return
    for offset, items in enumerate(order.to(feed.source.images.device).split(batch_size)):
        images = feed.source.images[items]
        if augmented:
            generator = torch.Generator().manual_seed(step_seed(seed, epoch, start + offset))
            images = augment(images, generator)
        yield start + offset, _ready(feed, images, feed.source.labels[items])


def plain_batches(feed: Feed, items: Tensor, *, batch_size: int | None = None) -> Iterator[Batch]:
    """The given items in their order, without augmentation: for evaluation and calibration."""
    if isinstance(feed.source, FolderIndex):
        size = batch_size or FOLDER_EVAL_BATCH
        for images, labels in FolderBatches(feed.source, items, "val", size, feed.n_workers, 0, 0):
            yield _ready(feed, images, labels)
        return
    for chosen in items.to(feed.source.images.device).split(batch_size or EVAL_BATCH):
        yield _ready(feed, feed.source.images[chosen], feed.source.labels[chosen])


def _ready(feed: Feed, images: Tensor, labels: Tensor) -> Batch:
    """The batch as the network takes it: on the device, float32, bytes normalised."""
    images = images.to(feed.device, non_blocking=True)
    if images.dtype == torch.uint8:
        images = normalise(images)
    if feed.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, labels.to(feed.device, non_blocking=True)
