"""Normalises, shifts and mirrors batches of images, on their own device."""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.errors import DataError

MEAN = (0.485, 0.456, 0.406)  # the constants that published CIFAR-10 networks were trained with
STD = (0.229, 0.224, 0.225)
CROP_PADDING = 4


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


Shifts = tuple[Tensor, Tensor]  # offsets of N images (2 x N x 1, 0 .. 2 * CROP_PADDING), and which to mirror (N x 1)


def draw_shifts(n_images: int, generator: torch.Generator) -> Shifts:
    """Draws shifts uniformly from {-4 .. 4}^2 and mirroring with probability 1/2, independently for each image.

    Drawn on the generator's device: a CPU generator gives the same shifts everywhere.
    """
    device, n_offsets = generator.device, 2 * CROP_PADDING + 1
    offsets = torch.randint(n_offsets, (2, n_images, 1), generator=generator, device=device)
    return offsets, torch.randint(2, (n_images, 1), generator=generator, device=device).bool()


def join_shifts(parts: Sequence[Shifts], device: torch.device) -> Shifts:
    """Concatenates the shifts of several batches on the device, without synchronising a GPU."""
    offsets, mirrored = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])
    if device.type == "cuda":
        offsets, mirrored = offsets.pin_memory(), mirrored.pin_memory()
    return offsets.to(device, non_blocking=True), mirrored.to(device, non_blocking=True)


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
