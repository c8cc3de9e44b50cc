"""Batches for training, evaluation and calibration, from images in memory or folders of image files.

A batch depends only on (seed, epoch, step): its order comes from `epoch_order`, its augmentation from a generator made
for that step. So a resumed run sees the same batches without any saved random state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.errors import DataError, OptionError
from sipp_lab.data.imagefolder import FolderIndex, Mode, folder_batches
from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.splits import Splits, epoch_order
from sipp_lab.data.transforms import draw_shifts, join_shifts, normalise, shift
from sipp_lab.recipes.schema import Training
from sipp_lab.seeds import step_seed

Batch = tuple[Tensor, Tensor]
Share = tuple[int, int]  # rank of this process, number of processes

EVAL_BATCH = 1000  # images per batch without gradients; image files are 49 times larger
FOLDER_EVAL_BATCH = 256
AHEAD = 4096  # training images prepared at a time
NO_LABEL = -100  # torch's own ignore_index


@dataclass(frozen=True, eq=False)
class Feed:
    """A data set with its splits, the device of its batches, and the number of image-decoding processes."""

    data: ImageSet | FolderIndex
    splits: Splits
    device: torch.device
    n_workers: int = 0


def n_steps(feed: Feed, hyper: Training) -> int:
    """Steps per epoch, including a short last batch."""
    return math.ceil(len(feed.splits.train) / hyper.batch_size)


def train_batches(
    feed: Feed, hyper: Training, *, seed: int, epoch: int, share: Share = (0, 1)
) -> Iterator[tuple[int, Batch]]:
    """Yields (step, batch) for one epoch, in the order given by (seed, epoch).

    With share (i, n): every n-th item of each batch, starting at item i. If a short last batch has none for a process,
    it gets one item labelled `NO_LABEL`, which the loss ignores, so that all processes make the same number of steps.
    """
    if not len(feed.splits.train):
        raise DataError("there is nothing to train on: the training split is empty")
    order, size = epoch_order(feed.splits.train, seed=seed, epoch=epoch), hyper.batch_size
    step, (rank, world_size) = 0, share
    if isinstance(feed.data, FolderIndex):
        if size % world_size:
            raise OptionError(f"batch_size={size} cannot be divided evenly among {world_size} processes")
        own = [chunk[rank::world_size] if rank < len(chunk) else chunk[:1] for chunk in order.split(size)]
        mode: Mode = "train" if hyper.augment else "val"  # crops and flips while decoding
        each, n_workers = size // world_size, feed.n_workers
        loaded = folder_batches(
            feed.data, torch.cat(own), mode=mode, batch_size=each, n_workers=n_workers, seed=seed, epoch=epoch
        )
        for step, (images, labels) in enumerate(loaded):
            is_padding = rank >= len(order) - step * size
            yield step, _to_device(feed, images, torch.full_like(labels, NO_LABEL) if is_padding else labels)
        return
    # Several batches at a time: fewer, larger GPU operations, and no synchronisation at each step.
    for items in order.to(feed.data.images.device).split(max(1, AHEAD // size) * size):
        images, sizes = feed.data.images[items], [len(batch) for batch in items.split(size)]
        if hyper.augment:  # drawn for whole batches, so that it does not depend on the number of processes
            seeds = [step_seed(seed, epoch, step + i) for i in range(len(sizes))]
            drawn = [draw_shifts(n, torch.Generator().manual_seed(one)) for n, one in zip(sizes, seeds)]
            images = shift(images, join_shifts(drawn, images.device))
        images, labels = _to_device(feed, images, feed.data.labels[items])
        for batch, targets in zip(images.split(size), labels.split(size)):
            if rank < len(targets):
                yield step, (batch[rank::world_size], targets[rank::world_size])
            else:
                yield step, (batch[:1], torch.full_like(targets[:1], NO_LABEL))
            step += 1


def eval_batches(feed: Feed, items: Tensor, *, batch_size: int | None = None) -> Iterator[Batch]:
    """The given items in their order, without augmentation: for evaluation and calibration."""
    if isinstance(feed.data, FolderIndex):
        size = batch_size or FOLDER_EVAL_BATCH
        for images, labels in folder_batches(feed.data, items, mode="val", batch_size=size, n_workers=feed.n_workers):
            yield _to_device(feed, images, labels)
        return
    for chosen in items.to(feed.data.images.device).split(batch_size or EVAL_BATCH):
        yield _to_device(feed, feed.data.images[chosen], feed.data.labels[chosen])


def _to_device(feed: Feed, images: Tensor, labels: Tensor) -> Batch:
    """The batch on the device, as float32 (bytes are normalised)."""
    images = images.to(feed.device, non_blocking=True)
    if images.dtype == torch.uint8:
        images = normalise(images)
    return images, labels.to(feed.device, non_blocking=True)
