"""Image sets in memory, and what is done to their batches: shifts, mirroring, bytes to numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.errors import DataError
from sipp.files import sha256_of
from sipp_lab.seeds import step_seed

MEAN = (0.485, 0.456, 0.406)  # the constants that published CIFAR-10 networks were trained with
STD = (0.229, 0.224, 0.225)
CROP_PADDING = 4

Batch = tuple[Tensor, Tensor]  # images and labels
Draw = tuple[int, int]  # seed and epoch, which decide the augmentation
Share = tuple[int, int]  # rank of this process, number of processes
ALL: Share = (0, 1)


def share_of(items: Tensor, share: Share) -> Tensor:
    """Every n-th item from the process's own on; the first if there is none for it, so that all make a step."""
    rank, world_size = share
    return items[rank::world_size] if rank < len(items) else items[:1]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images N x C x H x W and labels N; items 0 .. n_train - 1 are for training, the rest are the test set."""

    name: str
    images: Tensor
    labels: Tensor
    n_train: int
    n_classes: int

    EVAL_BATCH = 1000  # images per batch without gradients

    def __post_init__(self) -> None:
        n_items = len(self.images)
        if self.images.dim() != 4 or self.labels.shape != (n_items,) or self.labels.dtype != torch.int64:
            raise DataError(
                f"images must be N x C x H x W with N int64 labels, got {tuple(self.images.shape)} and "
                f"{tuple(self.labels.shape)} {self.labels.dtype}",
                where=self.name,
            )
        if not 0 < self.n_train <= n_items:
            raise DataError(f"n_train = {self.n_train} is not within 1 .. {n_items}", where=self.name)

    @property
    def n_test(self) -> int:
        return len(self.images) - self.n_train

    @property
    def content_hash(self) -> str:
        """SHA-256 of shapes, dtypes and all bytes of images and labels; the same on every device."""
        parts: list[bytes | memoryview] = [f"{self.name} {self.n_train} {self.n_classes}".encode()]
        for tensor in (self.images, self.labels):
            parts.append(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            parts.append(tensor.detach().cpu().contiguous().numpy().data)
        return sha256_of(*parts)

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set with both tensors on `device`."""
        return ImageSet(self.name, self.images.to(device), self.labels.to(device), self.n_train, self.n_classes)

    def batches(self, chunks: Sequence[Tensor], *, augment: Draw | None = None, share: Share = ALL) -> Iterator[Batch]:
        """A batch for each chunk of items, or for this process's share of it.

        What augmentation does to an item depends on (seed, epoch, step) and its place in the chunk, so it does not
        depend on the number of processes.
        """
        move = partial(torch.Tensor.to, device=self.images.device, non_blocking=True)  # does not wait for a GPU
        for step, items in enumerate(chunks):
            places = share_of(torch.arange(len(items)), share)
            mine = move(items[places])
            images = self.images[mine]
            if augment is not None:
                generator = torch.Generator().manual_seed(step_seed(*augment, step))
                offsets, mirrored = draw_shifts(len(items), generator)
                images = shift(images, (move(offsets[:, places]), move(mirrored[places])))
            yield images, self.labels[mine]


# --- bytes to numbers -------------------------------------------------------------------------------------------------


def normalise(batch: Tensor, *, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """Converts uint8 images N x C x H x W to float32 (x / 255 - mean) / std.

    A single mean applies to all channels. Other dtypes are refused, so that no batch is normalised twice.
    """
    if batch.dtype != torch.uint8 or batch.dim() != 4:
        raise DataError(f"{batch.dtype} {tuple(batch.shape)}: these are not images as bytes (uint8, N x C x H x W)")
    if len(mean) not in (1, batch.shape[1]):
        raise DataError(f"{len(mean)} means for the {batch.shape[1]} channels of the images")
    return (batch.to(torch.float32) / 255 - _channels(mean, batch.device)) / _channels(std, batch.device)


@cache  # copied to a GPU only once: every copy synchronises
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One value per channel, C x 1 x 1."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


# --- augmentation -----------------------------------------------------------------------------------------------------

Shifts = tuple[Tensor, Tensor]  # offsets of N images (2 x N x 1, 0 .. 2 * CROP_PADDING), and which to mirror (N x 1)


def draw_shifts(n_images: int, generator: torch.Generator) -> Shifts:
    """Draws shifts uniformly from {-4 .. 4}^2 and mirroring with probability 1/2, independently for each image.

    Drawn on the generator's device: a CPU generator gives the same shifts everywhere.
    """
    device, n_offsets = generator.device, 2 * CROP_PADDING + 1
    offsets = torch.randint(n_offsets, (2, n_images, 1), generator=generator, device=device)
    return offsets, torch.randint(2, (n_images, 1), generator=generator, device=device).bool()


def shift(batch: Tensor, shifts: Shifts) -> Tensor:
    """Shifts (padding with zeros) and mirrors all images at once."""
    if batch.dim() != 4:
        raise DataError(f"images are N x C x H x W, got {tuple(batch.shape)}")
    n_images, n_channels, height, width = batch.shape
    padded = F.pad(batch, (CROP_PADDING,) * 4)
    steps = torch.arange(width, device=batch.device)
    offsets, mirrored = shifts
    rows = offsets[0] + torch.arange(height, device=batch.device)  # N x H
    columns = offsets[1] + torch.where(mirrored, steps.flip(0), steps)  # N x W
    images = torch.arange(n_images, device=batch.device).view(-1, 1, 1, 1)
    channels = torch.arange(n_channels, device=batch.device).view(1, -1, 1, 1)
    return padded[images, channels, rows[:, None, :, None], columns[:, None, None, :]]
