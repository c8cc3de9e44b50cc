"""The sets of inputs that --data and --holdout name: data sets, array files, folders of images, text, or noise."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sipp.cli.errors import CommandError
from sipp.cli.language_text import is_language_model, is_text, sentences, sequences
from sipp.cli.normalise_option import USUAL, Normalisation, normalisation_of
from sipp.cli.options import DEFAULT_ROOT, KINDS, InputOptions
from sipp.errors import DataError, OptionError
from sipp_lab.data.cifar10 import load_cifar10
from sipp_lab.data.digits import load_digits
from sipp_lab.data.imagefolder import SIDE, SUFFIXES, FolderIndex, folder_batches, index_folders
from sipp_lab.data.imageset import ImageSet
from sipp_lab.nets import NETS

Role = Literal["calibration", "holdout"]
Kind = Literal["built-in", "file", "folder", "text", "random"]

INPUTS, LABELS, TEXT = "inputs", "labels", ".txt"
# other names for these in files that hold nothing else
INPUT_NAMES, LABEL_NAMES = ("x", "X", "images", "data", "arr_0"), ("y", "Y", "label", "targets", "target", "arr_1")
MAX_FILE_BYTES = 16 << 30  # unpacked, since it is held in memory
MAX_RANDOM = 1 << 30  # numbers in `random:`
_RANDOM = re.compile(r"random:(\d+(?:x\d+)+)")


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


def find_source(spec: str, role: Role, model: str, options: InputOptions, seed: int) -> Source:
    """The source that `spec` names, for a network that is named `model`.

    If it has a test part, a holdout comes from it and calibration from the training part, because a network from
    elsewhere may have been trained on all of that.
    """
    chosen, path, (name, _, root) = normalisation_of(options.normalise), Path(spec), spec.partition(":")
    if options.size is not None and (name in ("random", "digits", "cifar10") or not path.is_dir()):
        raise CommandError(f"{spec} is not a folder of images", where=f"--size {options.size}", fix="leave it out")
    if path.exists() and is_text(path) and is_language_model(model):
        ids, words = sequences(path, model, options.length, role, seed)
        source = _of_tensors("text", {"input_ids": ids}, words)
    elif options.length is not None:
        raise DataError(
            "--length cuts text for a causal language model, and this is not one",
            fix="leave it out, or give --model hf:DIR of one and text",
        )
    elif name == "random":
        source = _of_tensors("random", _noise(spec, role, seed), "random inputs (noise, no data)")
    elif name == "digits" and not root:
        return _image_set(load_digits(), role, chosen)
    elif name == "cifar10":
        return _image_set(load_cifar10(Path(root) if root else DEFAULT_ROOT), role, chosen)
    elif path.is_dir():
        return _image_folder(path, role, chosen or USUAL, options.size or _image_side(model))
    elif not path.is_file():
        raise DataError(f"{spec} is neither a file, a folder nor the name of a data set", fix=f"give {KINDS}")
    elif path.suffix == TEXT:
        source = _of_tensors("file", sentences(path, model), f"sentences of {path.name}")
    else:
        return _array_file(path, chosen)
    if chosen is not None:
        raise CommandError(f"{spec} holds no images", where=f"--normalise {options.normalise}", fix="leave it out")
    return source


def noise_for(model: str, n_points: int) -> str | None:
    """The value of --data for noise in the input shape of a built-in network; None for others."""
    return "random:" + "x".join(map(str, (n_points, *NETS[model].input_shape))) if model in NETS else None


def _of_tensors(
    kind: Kind, tensors: dict[str, Tensor], what: str, normalised: Normalisation | None = None, unlabelled: str = ""
) -> Source:
    """Inputs that are held in memory, by name."""
    n = len(next(iter(tensors.values())))

    def take(items: Tensor) -> dict[str, Tensor]:
        return {name: tensor[items] for name, tensor in tensors.items()}

    return Source(kind, n, what, take, normalised=normalised, unlabelled=unlabelled)


def _image_set(data: ImageSet, role: Role, chosen: Normalisation | None) -> Source:
    """A built-in image set: its training part for calibration, its test part as holdout."""
    normalised = chosen or (USUAL if data.images.dtype == torch.uint8 else None)
    first, n, part = (0, data.n_train, "training") if role == "calibration" else (data.n_train, data.n_test, "test")

    def take(items: Tensor) -> dict[str, Tensor]:
        images, labels = data.images[first + items], data.labels[first + items]
        return {INPUTS: images if normalised is None else normalised.apply(images), LABELS: labels}

    return Source("built-in", n, f"{part} images of {data.name}", take, True, normalised)


def _array_file(path: Path, chosen: Normalisation | None) -> Source:
    """The arrays of a file by name, of equal length; integer labels become int64.

    Values are used as they are; with --normalise they must be images as bytes.
    """
    try:
        tensors = _with_our_names(_read_arrays(path))
    except (
        ValueError, TypeError, OSError, MemoryError, EOFError, SafetensorError, zipfile.BadZipFile, RuntimeError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        if isinstance(error, DataError):
            raise
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
    """Reads the arrays of a file; refuses pickles and files that unpack to too much memory."""
    if path.suffix == ".npy":
        return {INPUTS: _to_tensor(np.load(path, allow_pickle=False), path, INPUTS)}
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            total = sum(member.file_size for member in archive.infolist())
        if total > MAX_FILE_BYTES:
            raise DataError(f"{path} unpacks to {total:,} bytes, more than {MAX_FILE_BYTES:,}", fix="split it")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _to_tensor(arrays[name], path, name) for name in arrays.files}
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    if path.suffix in (".pt", ".pth"):
        return _tensors_in(torch.load(path, "cpu", weights_only=True), path)
    raise DataError(
        "files of inputs end in .npy, .npz, .safetensors or .pt",
        where=path,
        fix="convert it, or give a folder of images",
    )


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


def _to_tensor(array: Any, path: Path, name: str) -> Tensor:
    """Converts an array of any byte order to a tensor; DataError if it is not numeric."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        kind = getattr(array, "dtype", type(array).__name__)
        raise DataError(f"{name} holds {kind}, not numbers", where=path, fix="give an array of numbers")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape))


def _noise(spec: str, role: Role, seed: int) -> dict[str, Tensor]:
    """Gaussian noise, for checking shapes and timing only."""
    match = _RANDOM.fullmatch(spec)
    if match is None:
        raise OptionError(f"{spec!r} is not a shape", fix="give random:POINTSxSHAPE, such as random:16x3x224x224")
    if role == "holdout":
        raise OptionError(
            "a certificate on noise says nothing about your inputs", fix="give real inputs as the holdout"
        )
    shape = [int(number) for number in match.group(1).split("x")]
    n_numbers = int(np.prod(shape, dtype=object))
    if not 0 < n_numbers <= MAX_RANDOM:
        raise OptionError(f"{spec!r} means {n_numbers:,} numbers", fix=f"give 1 to {MAX_RANDOM:,}")
    return {INPUTS: torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def _image_side(model: str) -> int | None:
    """The image side of a built-in network; None: ImageNet's, or not a built-in network."""
    side = NETS[model].input_shape[-1] if model in NETS else SIDE
    return None if side == SIDE else side


def _image_folder(path: Path, role: Role, chosen: Normalisation, side: int | None) -> Source:
    """A folder of images: `train/CLASS/*` and `val/CLASS/*` by role, one subfolder per class, or unlabelled images.

    Classes are numbered in the order of their names, as in torchvision's ImageFolder.
    """
    has_parts = (path / "train").is_dir() and (path / "val").is_dir()
    index = index_folders(path) if has_parts else _index_any(path)
    is_rest = has_parts and role == "holdout"
    first, n = (index.n_train, len(index.paths) - index.n_train) if is_rest else (0, index.n_train)
    part = "images" if not has_parts else "validation images" if is_rest else "training images"

    def take(items: Tensor) -> dict[str, Tensor]:
        batches = list(folder_batches(index, first + items, mode="val", batch_size=max(1, len(items)), side=side))
        images, labels = (torch.cat(parts) for parts in zip(*batches))
        inputs = chosen.apply(images)
        return {INPUTS: inputs, LABELS: labels} if index.classes else {INPUTS: inputs}

    pixels = side or SIDE
    kinds = f"{len(index.classes)} classes" if index.classes else "without labels"
    why = "" if index.classes else f"{path} is not divided into one folder for each class"
    what = f"{part} of {path}, {pixels} x {pixels}, {kinds}"
    return Source("folder", n, what, take, has_parts, chosen, index.classes, why)


def _index_any(path: Path) -> FolderIndex:
    """All images in a folder in sorted order, labelled if they are all in class folders."""
    images = sorted(
        os.path.relpath(os.path.join(root, name), path)
        for root, _, names in os.walk(path)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES
    )
    if not images:
        raise DataError(
            f"{path} holds no images ({', '.join(sorted(SUFFIXES))})",
            fix=f"give {path}/train/CLASS/*.jpg and {path}/val/CLASS/*.jpg, or images anywhere in it",
        )
    tops = [Path(image).parts[0] if len(Path(image).parts) > 1 else "" for image in images]
    classes = tuple(sorted(set(tops)))
    if len(classes) < 2 or "" in classes:
        classes = ()
    labels = torch.tensor([classes.index(top) if classes else 0 for top in tops], dtype=torch.int64)
    return FolderIndex(path, classes, tuple(images), labels, len(images), "")
