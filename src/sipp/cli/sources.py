"""A set of inputs to draw from, and the one in a file of arrays."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sipp.cli.images import Normalisation
from sipp.errors import DataError

INPUTS, LABELS = "inputs", "labels"
SHORT = {"x": INPUTS, "y": LABELS}  # other names for these, in files that hold nothing else
NOT_READ = (
    ValueError, TypeError, OSError, MemoryError, EOFError, zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError,
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A set of inputs to draw from: its size, a description, and a function from item numbers to tensors."""

    kind: Literal["built-in", "file", "folder", "text"]
    n_inputs: int
    what: str  # "training images of digits"
    take: Callable[[Tensor], dict[str, Tensor]]
    has_holdout: bool = False  # the same name gives other inputs as a holdout
    normalised: Normalisation | None = None  # applied to images stored as bytes; None: nothing
    classes: tuple[str, ...] = ()  # of a folder with one subfolder per class, in label order
    unlabelled: str = ""  # why the inputs have no labels
    option: str = ""  # that names it: "--data"
    spec: str = ""  # as typed

    @property
    def where(self) -> str:
        """Where errors say they are: "--data x.npz"."""
        return f"{self.option} {self.spec}"


def source_of(kind: Literal["file", "text"], tensors: dict[str, Tensor], what: str, **about: Any) -> Source:
    """Inputs that are held in memory, by name."""
    n = len(next(iter(tensors.values())))
    return Source(kind, n, what, lambda items: {name: tensor[items] for name, tensor in tensors.items()}, **about)


def array_file(path: Path, normalised: Normalisation | None) -> Source:
    """The arrays of a file by name, of equal length.

    Values are used as they are; those to be normalised must be images as bytes.
    """
    try:
        tensors = _read(path)
    except DataError:
        raise
    except NOT_READ as error:
        # numpy's message explains how to load pickles, which we do not want
        is_pickle = "pickle" in str(error) or isinstance(error, pickle.UnpicklingError)
        reason = "it is broken, or contains a pickle" if is_pickle else f"{type(error).__name__}: {error}"
        raise DataError(f"{path} could not be read ({reason})", fix="give an intact file of numbers") from error
    if tensors.keys() <= SHORT.keys():
        tensors = {SHORT[name]: tensor for name, tensor in tensors.items()}
    lengths = {name: len(tensor) if tensor.dim() else None for name, tensor in tensors.items()}
    wrong = ""
    if not tensors or set(tensors) == {LABELS}:
        wrong = "labels but no inputs" if tensors else "no arrays"
    elif len(set(lengths.values())) != 1 or None in lengths.values():
        wrong = f"arrays of {lengths} inputs, not equally many inputs along dimension 0"
    elif 0 in lengths.values():
        wrong = "no inputs"
    if wrong:
        raise DataError(f"{path} contains {wrong}", fix=f"expected {INPUTS}, or the names of the network's arguments")
    if normalised is not None:
        name = INPUTS if INPUTS in tensors else next(iter(tensors))
        tensors[name] = normalised.apply(tensors[name])
    unlabelled = "" if LABELS in tensors else f"{path.name} contains no array {LABELS!r}"
    return source_of("file", tensors, f"inputs from {path.name}", normalised=normalised, unlabelled=unlabelled)


def _read(path: Path) -> dict[str, Tensor]:
    """Reads the arrays of a file; the libraries read no pickles."""
    if path.suffix == ".npy":
        return {INPUTS: _tensor(np.load(path, allow_pickle=False))}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _tensor(arrays[name]) for name in arrays.files}
    if path.suffix not in (".pt", ".pth"):
        raise DataError(
            "files of inputs end in .npy, .npz or .pt", where=path, fix="convert it, or give a folder of images"
        )
    saved = torch.load(path, "cpu", weights_only=True)
    if isinstance(saved, tuple | list) and len(saved) == 2:
        saved = {INPUTS: saved[0], LABELS: saved[1]}
    saved = {INPUTS: saved} if isinstance(saved, Tensor) else saved
    if not isinstance(saved, dict) or not all(isinstance(value, Tensor) for value in saved.values()):
        raise DataError(
            f"it contains a {type(saved).__name__}",
            where=path,
            fix="save a tensor, (inputs, labels) or a dict of tensors",
        )
    return {str(name): value.detach() for name, value in saved.items()}


def _tensor(array: Any) -> Tensor:
    """An array of any byte order as a tensor; torch raises an error for what is not numeric."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))
