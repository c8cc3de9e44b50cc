"""A labelled image set in memory: images and labels as two tensors, training items first."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.errors import DataError
from sipp.files import sha256_of


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images N x C x H x W and labels N; items 0 .. n_train - 1 are for training, the rest are the test set."""

    name: str
    images: Tensor
    labels: Tensor
    n_train: int
    n_classes: int

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

    def to(self, device: torch.device | str) -> "ImageSet":
        """The same set with both tensors on `device`."""
        return ImageSet(self.name, self.images.to(device), self.labels.to(device), self.n_train, self.n_classes)
