"""The sets of inputs that --data and --holdout name: data sets, array files, folders of images, or text."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sipp.cli.errors import CommandError, naming_option
from sipp.cli.images import Normalisation, Pictures, normalisation_of, pictures_in, pictures_of_set, side_for
from sipp.cli.options import DEFAULT_ROOT, KINDS, Reading
from sipp.cli.texts import PLAIN, is_language_model, is_text, sentences, sequences
from sipp.errors import DataError
from sipp_lab.data.cifar10 import load_cifar10
from sipp_lab.data.digits import load_digits

Kind = Literal["built-in", "file", "folder", "text"]

INPUTS, LABELS = "inputs", "labels"
# other names for these in files that hold nothing else
INPUT_NAMES, LABEL_NAMES = ("x", "X", "images", "data", "arr_0"), ("y", "Y", "label", "targets", "target", "arr_1")
NOT_READ = (
    ValueError, TypeError, OSError, MemoryError, EOFError, SafetensorError, zipfile.BadZipFile, RuntimeError,
    pickle.UnpicklingError,
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A set of inputs to draw from: its size, a description, and a function from item numbers to tensors."""

    kind: Kind
    n_points: int
    what: str  # "training images of digits"
    take: Callable[[Tensor], dict[str, Tensor]]
    has_holdout: bool = False  # the same name gives different points as a holdout
    normalised: Normalisation | None = None  # applied to images stored as bytes; None: nothing
    classes: tuple[str, ...] = ()  # of a folder with one subfolder per class, in label order
    unlabelled: str = ""  # why the points have no labels
    option: str = ""  # that names it: "--data"
    spec: str = ""  # as typed

    @property
    def where(self) -> str:
        """Where errors say they are: "--data x.npz"."""
        return f"{self.option} {self.spec}"


def find_source(spec: str, model: str, reading: Reading, *, is_holdout: bool, seed: int, option: str) -> Source:
    """The source that an option names, for a network that is named `model`.

    If it has a test part, a holdout comes from it and calibration from the training part, because a network from
    elsewhere may have been trained on all of that.
    """
    with naming_option(f"{option} {spec}", f"give {KINDS}"):
        return replace(_find(spec, model, reading, is_holdout, seed), option=option, spec=spec)


def _find(spec: str, model: str, reading: Reading, is_holdout: bool, seed: int) -> Source:
    chosen, path, (name, _, root) = normalisation_of(reading.normalise), Path(spec), spec.partition(":")
    if reading.size is not None and (name in ("digits", "cifar10") or not path.is_dir()):
        raise CommandError(f"{spec} is not a folder of images", where=f"--size {reading.size}", fix="leave it out")
    if path.exists() and is_text(path) and is_language_model(model):
        ids, words = sequences(path, model, reading.length, is_holdout, seed)
        source = _of_tensors("text", {"input_ids": ids}, words)
    elif reading.length is not None:
        raise DataError(
            "--length cuts text for a causal language model, and this is not one",
            fix="leave it out, or give --model hf:DIR of one and text",
        )
    elif name == "digits" and not root:
        return _of_pictures("built-in", pictures_of_set(load_digits(), is_holdout, chosen), "")
    elif name == "cifar10":
        data = load_cifar10(Path(root) if root else DEFAULT_ROOT)
        return _of_pictures("built-in", pictures_of_set(data, is_holdout, chosen), "")
    elif path.is_dir():
        pictures = pictures_in(path, is_holdout, chosen, reading.size or side_for(model))
        return _of_pictures("folder", pictures, f"{path} is not divided into one folder for each class")
    elif not path.is_file():
        raise DataError(f"{spec} is neither a file, a folder nor the name of a data set", fix=f"give {KINDS}")
    elif path.suffix == PLAIN[0]:
        source = _of_tensors("file", sentences(path, model), f"sentences of {path.name}")
    else:
        return _array_file(path, chosen)
    if chosen is not None:
        raise CommandError(f"{spec} holds no images", where=f"--normalise {reading.normalise}", fix="leave it out")
    return source


def _of_tensors(
    kind: Kind, tensors: dict[str, Tensor], what: str, normalised: Normalisation | None = None, unlabelled: str = ""
) -> Source:
    """Inputs that are held in memory, by name."""
    n = len(next(iter(tensors.values())))

    def take(items: Tensor) -> dict[str, Tensor]:
        return {name: tensor[items] for name, tensor in tensors.items()}

    return Source(kind, n, what, take, normalised=normalised, unlabelled=unlabelled)


def _of_pictures(kind: Kind, pictures: Pictures, why_unlabelled: str) -> Source:
    def take(items: Tensor) -> dict[str, Tensor]:
        images, labels = pictures.take(items)
        return {INPUTS: images} if labels is None else {INPUTS: images, LABELS: labels}

    unlabelled = "" if pictures.classes else why_unlabelled
    return Source(
        kind, pictures.n, pictures.what, take, pictures.has_holdout, pictures.normalised, pictures.classes, unlabelled
    )


def _array_file(path: Path, chosen: Normalisation | None) -> Source:
    """The arrays of a file by name, of equal length; integer labels become int64.

    Values are used as they are; with --normalise they must be images as bytes.
    """
    try:
        tensors = _with_our_names(_read_arrays(path))
    except DataError:
        raise
    except NOT_READ as error:
        # numpy's message explains how to load pickles, which we do not want
        is_pickle = "pickle" in str(error) or isinstance(error, pickle.UnpicklingError)
        reason = "it is broken, or holds a pickle" if is_pickle else f"{type(error).__name__}: {error}"
        raise DataError(f"{path} could not be read ({reason})", fix="give an intact file of numbers") from error
    if not tensors or set(tensors) == {LABELS}:
        held = "labels but no inputs" if tensors else "no arrays"
        raise DataError(f"{path} holds {held}", fix=f"expected {INPUTS}, or the names of the network's arguments")
    lengths = {name: len(t) if t.dim() else None for name, t in tensors.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise DataError(
            f"{path} holds arrays of {lengths} inputs", fix="give arrays with equally many inputs along dimension 0"
        )
    if 0 in lengths.values():
        raise DataError(f"{path} holds no inputs", fix="give at least one")
    if LABELS in tensors and not tensors[LABELS].is_floating_point():
        tensors[LABELS] = tensors[LABELS].long()
    if chosen is not None:
        name = INPUTS if INPUTS in tensors else next(iter(tensors))
        tensors[name] = chosen.apply(tensors[name])
    unlabelled = "" if LABELS in tensors else f"{path.name} holds no array {LABELS!r}"
    return _of_tensors("file", tensors, f"inputs from {path.name}", chosen, unlabelled)


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """Reads the arrays of a file; pickles are refused by the libraries."""
    if path.suffix == ".npy":
        return {INPUTS: _to_tensor(np.load(path, allow_pickle=False))}
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _to_tensor(arrays[name]) for name in arrays.files}
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    if path.suffix in (".pt", ".pth"):
        return _tensors_in(torch.load(path, "cpu", weights_only=True), path)
    raise DataError(
        "files of inputs end in .npy, .npz, .safetensors or .pt",
        where=path,
        fix="convert it, or give a folder of images",
    )


def _to_tensor(array: Any) -> Tensor:
    """An array of any byte order as a tensor; torch refuses what is not numeric."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


def _tensors_in(saved: Any, path: Path) -> dict[str, Tensor]:
    """The tensors that torch.save wrote: one, a pair of inputs and labels, or a dict."""
    if isinstance(saved, tuple | list) and len(saved) == 2:
        saved = {INPUTS: saved[0], LABELS: saved[1]}
    saved = {INPUTS: saved} if isinstance(saved, Tensor) else saved
    if not isinstance(saved, dict) or not all(isinstance(value, Tensor) for value in saved.values()):
        raise DataError(
            f"it holds a {type(saved).__name__}", where=path, fix="save a tensor, (inputs, labels) or a dict of tensors"
        )
    return {str(name): value.detach() for name, value in saved.items()}


def _with_our_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with x and y (and the like) as inputs and labels if there is nothing else."""
    inputs, labels = ([name for name in names if name in tensors] for names in (INPUT_NAMES, LABEL_NAMES))
    labels += [LABELS] if LABELS in tensors else []
    if len(inputs) != 1 or len(labels) > 1 or len(tensors) != 1 + len(labels):
        return tensors
    ours = {INPUTS: tensors[inputs[0]]}
    return ours | {LABELS: tensors[labels[0]]} if labels else ours
