"""Class numbers from labels in whatever form people write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_CLASSES = 1 << 31  # larger floats are not class numbers


@dataclass(frozen=True)
class Truth:
    """The class number of every point, or why the labels give none."""

    classes_n: Tensor | None  # int64, on the CPU; None: there are no labels, or `why` says what they are
    why: str = ""


def truth_of(labels: Any, n: int, n_classes: int | None = None) -> Truth:
    """The classes that labels name: n whole numbers (also as floats, or n x 1), or n one-hot rows of `n_classes`.

    Whether a number is one of the classes is for the caller to check. `n_classes=None`: one-hot rows of any length.

    Example:
        >>> truth_of(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 2).classes_n
        tensor([1, 0])
    """
    if labels is None:
        return Truth(None)
    try:
        given = torch.as_tensor(labels, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return Truth(None, f"labels are a {type(labels).__name__}, no class numbers")
    shape = " x ".join(map(str, given.shape)) or "one number"
    kind = f"labels are {str(given.dtype)[6:]} ({shape})"
    if given.is_complex() or given.dim() == 0 or len(given) != n:
        return Truth(None, f"{kind}, not {n} class numbers")
    if given.dim() == 1 or given.shape[1:] == (1,):
        whole = given.reshape(n)
        if whole.is_floating_point() and not bool(((whole == whole.round()) & (whole.abs() < MOST_CLASSES)).all()):
            return Truth(None, f"{kind}, and not all are whole: they are not class numbers")
        return Truth(whole.long())
    if given.dim() == 2 and n_classes in (None, given.shape[1]):
        if bool((((given == 0) | (given == 1)).all(1) & (given.double().sum(1) == 1)).all()):
            return Truth(given.double().argmax(1))
        return Truth(None, f"{kind}, and not every row has one 1 among zeros: they name no single class")
    return Truth(None, f"{kind}, not {n} class numbers" + (f" or rows of {n_classes}" if n_classes else ""))


def cross_entropy(output: Tensor, labels: Any) -> Tensor:
    """The mean cross-entropy for labels in any form that names classes; other labels are passed on unchanged."""
    if isinstance(output, Tensor) and output.dim() == 2:
        truth = truth_of(labels, len(output), output.shape[1])
        if truth.classes_n is not None:
            return F.cross_entropy(output, truth.classes_n.to(output.device))
    return F.cross_entropy(output, labels)
