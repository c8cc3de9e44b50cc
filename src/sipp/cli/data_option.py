"""Reads the inputs named by --data and --holdout: data sets, array files, image or text folders, or noise."""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sipp.certificates.evidence import point_keys
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.hugging_face_models import sentences
from sipp.cli.language_text import N_SEQUENCES, is_language_model, is_text, sequences
from sipp.cli.normalise_option import USUAL, Normalisation, normalisation_of
from sipp.cli.options import DEFAULT_ROOT, KINDS
from sipp.errors import DataError, OptionError
from sipp.experiments.data import (
    FolderIndex,
    ImageSet,
    folder_batches,
    index_folders,
    load_cifar10,
    load_digits,
)
from sipp.experiments.data.imagefolder import SIDE, SUFFIXES
from sipp.experiments.nets import NETS
from sipp.inputs.batches import fresh
from sipp.inputs.capture import scoring_mode
from sipp.inputs.data import data_of, points_per_batch
from sipp.inputs.point_keys import set_hash
from sipp.records.display import labelled_line

Role = Literal["calibration", "holdout"]
Kind = Literal["built-in", "file", "folder", "text", "random"]

INPUTS, LABELS, TEXT = "inputs", "labels", ".txt"
N_HOLDOUT = 5000  # default for image folders, whose images are large
HOLDOUT_SHARE = 0.5  # of a file that is split into calibration and holdout
MAX_FILE_BYTES = 16 << 30  # unpacked, since it is held in memory
MAX_RANDOM = 1 << 30  # numbers in `random:`
_RANDOM = re.compile(r"random:(\d+(?:x\d+)+)")


@dataclass(frozen=True)
class Source:
    """A set of inputs to draw from: its size, a description, and a function from item numbers to tensors."""

    spec: str  # as typed
    kind: Kind
    n_points: int
    what: str  # "training images of digits"
    take: Callable[[Tensor], dict[str, Tensor]]
    has_holdout: bool = False  # the same name gives different points as a holdout
    normalised: Normalisation | None = None  # applied to images stored as bytes; None: nothing
    classes: tuple[str, ...] = ()  # of a folder with one subfolder per class, in label order
    unlabelled: str = ""  # why the points have no labels


@dataclass(frozen=True)
class Points:
    """Inputs drawn from a source, as batches."""

    source: Source
    batches: list[Any]  # inputs, (inputs, labels), {name: tensor} or ({name: tensor}, labels)
    n_points: int
    words: str
    hash: str  # of the set of points, as in certificates
    unlabelled: str  # why they have no labels

    @property
    def spec(self) -> str:
        return self.source.spec

    @property
    def is_noise(self) -> bool:
        return self.source.kind == "random"


@dataclass(frozen=True)
class Reader:
    """Reads inputs for a network, with the options of a command."""

    network: nn.Module
    model: str  # as typed; its tokenizer reads text
    normalise: str | None = None
    seed: int = 0
    batch_size: int | None = None
    length: int | None = None  # tokens per sequence, for a language model
    size: int | None = None  # image side for folders; None: that of a built-in network, or ImageNet's

    def open(self, spec: str, role: Role, option: str) -> Source:
        """The source that `spec` names.

        If it has a test part, a holdout comes from it and calibration from the training part, because a network from
        elsewhere may have been trained on all of that.
        """
        chosen, path, (name, _, root) = normalisation_of(self.normalise), Path(spec), spec.partition(":")
        if self.size is not None and (name in ("random", "digits", "cifar10") or not path.is_dir()):
            raise CommandError(f"{spec} is not a folder of images", where=f"--size {self.size}", fix="leave it out")
        with naming_option(f"{option} {spec}", f"give {KINDS}"):
            if path.exists() and is_text(path) and is_language_model(self.model):
                source = _sequence_source(spec, path, role, self.model, self.length, self.seed)
            elif self.length is not None:
                raise DataError(
                    "--length cuts text for a causal language model, and this is not one",
                    fix="leave it out, or give --model hf:DIR of one and text",
                )
            elif name == "random":
                source = _noise_source(spec, role, self.seed)
            elif name == "digits" and not root:
                return _image_set_source(spec, load_digits(), role, chosen)
            elif name == "cifar10":
                return _image_set_source(spec, load_cifar10(Path(root) if root else DEFAULT_ROOT), role, chosen)
            elif path.is_dir():
                return _folder_source(spec, path, role, chosen or USUAL, self.size or _image_side(self.model))
            elif not path.is_file():
                raise DataError(f"{spec} is neither a file, a folder nor the name of a data set", fix=f"give {KINDS}")
            elif path.suffix == TEXT:
                source = _text_source(spec, path, self.model)
            else:
                return _file_source(spec, path, chosen)
        if chosen is not None:
            raise CommandError(f"{spec} holds no images", where=f"--normalise {self.normalise}", fix="leave it out")
        return source

    def calibration(self, spec: str, asked: str | None, theory: Callable[[Any], int]) -> Points:
        """Draws the calibration points of `spec`, as many as --points asks for."""
        source = self.open(spec, "calibration", "--data")
        return self.draw(source, self.n_calibration(source, asked, theory), "--data")

    def holdout(self, spec: str, n_points: int | None, option: str = "--holdout") -> Points:
        """Draws the holdout points of `spec`: `n_points`, or all (at most `N_HOLDOUT` images from a folder)."""
        source = self.open(spec, "holdout", option)
        return self.draw(source, n_points or (N_HOLDOUT if source.kind == "folder" else None), option)

    def n_calibration(self, source: Source, asked: str | None, theory: Callable[[Any], int]) -> int | None:
        """The number of points that --points asks for; None: all.

        By default all of a file, `N_SEQUENCES` of a text, and as many as T4 requires from a data set. `theory` computes
        that from an example input.
        """
        if asked == "all" or (asked is None and source.kind in ("file", "random")):
            return None
        if asked is None and source.kind == "text":
            return N_SEQUENCES
        if asked is None or asked == "theory":
            first = self.draw(source, 1, "--data")
            batch = next(iter(data_of(first.batches).batches()))
            return theory((batch.kwargs or batch.args, None))
        if not asked.isascii() or not asked.isdigit() or int(asked) < 1:
            raise CommandError(
                f"{asked!r} is not a number of inputs",
                where=f"--points {asked}",
                fix="give a number of at least 1, all or theory",
            )
        if int(asked) > source.n_points:
            warnings.warn(f"--points {asked}: there are only {source.n_points:,}, and all are used", stacklevel=2)
        return int(asked)

    def draw(self, source: Source, n_points: int | None, option: str) -> Points:
        """Draws `n_points` without replacement, by the seed; None: all, in order."""
        items = torch.arange(source.n_points)
        if n_points is not None and n_points < source.n_points:
            items = _shuffle(source, self.seed)[:n_points]
        return self.collect(source, items, option)

    def split(self, source: Source, n_points: int | None, n_holdout: int | None) -> tuple[Points, Points]:
        """Splits one source into disjoint calibration and holdout points, by default in halves.

        The holdout does not depend on the number of calibration points.
        """
        n_theirs = int(source.n_points * HOLDOUT_SHARE) if n_holdout is None else n_holdout
        if not 1 <= n_theirs < source.n_points:
            raise CommandError(
                f"{source.n_points} inputs cannot be split into calibration and {n_theirs} holdout inputs",
                where=f"--data {source.spec}",
                fix="give more inputs, a smaller --holdout-points, or a file of its own with --holdout",
            )
        order = _shuffle(source, self.seed)
        ours = self.collect(source, order[n_theirs:][:n_points], "--data")
        return ours, self.collect(source, order[:n_theirs], "--data")

    def collect(self, source: Source, items: Tensor, option: str) -> Points:
        """Batches of these items for the network, with floats in its own dtype."""
        tensors, parameters = source.take(items), list(self.network.parameters())
        labels = tensors.pop(LABELS, None)
        dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        cast = sorted({str(t.dtype)[6:] for t in tensors.values() if t.is_floating_point() and t.dtype != dtype})
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        device = parameters[0].device if parameters else torch.device("cpu")
        step = self.batch_size or min(points_per_batch(tensor, device) for tensor in tensors.values())
        batches: list[Any] = []
        for start in range(0, len(items), step):
            part = {name: tensor[start : start + step] for name, tensor in tensors.items()}
            inputs: Any = part[INPUTS] if set(part) == {INPUTS} else part
            batches.append(inputs if labels is None else (inputs, labels[start : start + step]))
        n = len(items)
        words = f"{n:,} {source.what}" if n == source.n_points else f"{n:,} of {source.n_points:,} {source.what}"
        words += f", {', '.join(cast)} read as {str(dtype)[6:]}" if cast else ""
        drawn = Points(source, batches, n, words, set_hash(point_keys(batches, "data")), source.unlabelled)
        n_outputs = None if device.type == "meta" else self._n_outputs(drawn, device, option)
        if not source.classes or n_outputs in (None, len(source.classes)):
            return drawn
        why = f"the folder has {len(source.classes)} classes, the network {n_outputs} outputs"
        warnings.warn(f"{option} {source.spec}: labels are ignored, because {why}", stacklevel=2)
        return replace(drawn, batches=[inputs for inputs, _ in batches], unlabelled=why)

    def _n_outputs(self, points: Points, device: torch.device, option: str) -> int | None:
        """The number of classes in the output, None if it is not classes; CommandError if the network cannot run."""
        with naming_option(f"{option} {points.spec}", f"give {KINDS}"):
            first = data_of(points.batches, device=device, n_points=1, refuses_non_finite=False)
            batch = fresh(next(iter(first.batches())))
        named = {f"input {i}": value for i, value in enumerate(batch.args)} | batch.kwargs
        shapes = ", ".join(f"{name}: {str(t.dtype)[6:]} {' x '.join(map(str, t.shape))}" for name, t in named.items())
        try:
            with scoring_mode(self.network, "running"):
                output = self.network(*batch.args, **batch.kwargs)
            logits = getattr(output, "logits", output)
            return logits.shape[1] if isinstance(logits, Tensor) and logits.dim() == 2 else None
        except Exception as error:  # user code may raise anything
            raise CommandError(
                f"{self.model} cannot take this data ({type(error).__name__}: {error})",
                where=f"{option} {points.spec}, one input is {shapes}",
                fix=f"give inputs in the shape and type the network takes; a single array is named {INPUTS!r}, "
                "tensors under other names are passed as keywords",
            ) from error


def _shuffle(source: Source, seed: int) -> Tensor:
    """All item numbers, shuffled by the seed."""
    return torch.randperm(source.n_points, generator=torch.Generator().manual_seed(seed))


def _image_side(model: str) -> int | None:
    """The image side of a built-in network; None: ImageNet's, or not a built-in network."""
    side = NETS[model].input_shape[-1] if model in NETS else SIDE
    return None if side == SIDE else side


def data_or_noise(data: str | None, model: str, n_points: int, where: str) -> str:
    """The value of --data; by default noise in the input shape of a built-in network."""
    if data is not None:
        return data
    if model not in NETS:
        raise CommandError(
            f"{model} needs inputs to run on", where=where, fix=f"give --data, such as random:{n_points}x3x32x32"
        )
    return "random:" + "x".join(map(str, (n_points, *NETS[model].input_shape)))


def summary(points: Points | None) -> dict[str, Any] | None:
    """The description of the points in a record."""
    if points is None:
        return None
    source = points.source
    return {
        "spec": source.spec,
        "kind": source.kind,
        "what": points.words,
        "n_points": points.n_points,
        "hash": points.hash,
        "normalisation": None if source.normalised is None else source.normalised.record,
    }


def normalisation_lines(*drawn: Points | None) -> list[str]:
    """One line for each normalisation that was applied to images."""
    normalisations = (points.source.normalised for points in drawn if points is not None)
    return [
        labelled_line("images", normalisation.words)
        for normalisation in dict.fromkeys(normalisations)
        if normalisation is not None
    ]


def _image_set_source(spec: str, data: ImageSet, role: Role, chosen: Normalisation | None) -> Source:
    """A built-in image set: its training part for calibration, its test part as holdout."""
    is_bytes = data.images.dtype == torch.uint8
    normalised = chosen or (USUAL if is_bytes else None)
    first, n, part = (0, data.n_train, "training") if role == "calibration" else (data.n_train, data.n_test, "test")

    def take(items: Tensor) -> dict[str, Tensor]:
        images = data.images[first + items]
        return {
            INPUTS: images if normalised is None else normalised.apply(images),
            LABELS: data.labels[first + items],
        }

    return Source(spec, "built-in", n, f"{part} images of {data.name}", take, True, normalised)


def _text_source(spec: str, path: Path, model: str) -> Source:
    """One sentence per line, tokenized with the model's tokenizer."""
    tensors = sentences(path, model)
    n = len(next(iter(tensors.values())))
    return Source(spec, "file", n, f"sentences of {path.name}", lambda items: {k: t[items] for k, t in tensors.items()})


def _sequence_source(spec: str, path: Path, role: Role, model: str, length: int | None, seed: int) -> Source:
    """Sequences of tokens for a language model, from its tokenizer."""
    ids, words = sequences(path, model, length, role, seed)
    return Source(spec, "text", len(ids), words, lambda items: {"input_ids": ids[items]})


def _file_source(spec: str, path: Path, chosen: Normalisation | None) -> Source:
    """The arrays of a file by name, of equal length; integer labels become int64.

    Values are used as they are; with --normalise they must be images as bytes.
    """
    try:
        tensors = _read_arrays(path)
    except (ValueError, TypeError, OSError, MemoryError, EOFError, SafetensorError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        # numpy's message explains how to load pickles, which we do not want
        reason = "it is broken, or holds a pickle" if "pickle" in str(error) else f"{type(error).__name__}: {error}"
        raise DataError(f"{path} could not be read ({reason})", fix="give an intact file of numbers") from error
    if not tensors:
        raise DataError(f"{path} holds no arrays", fix=f"expected {INPUTS}, or the names of the network's arguments")
    lengths = {name: len(t) if t.dim() else None for name, t in tensors.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise DataError(
            f"{path} holds arrays of {lengths} inputs", fix="give arrays with equally many inputs along dimension 0"
        )
    if set(tensors) == {LABELS}:
        raise DataError(
            f"{path} holds labels but no inputs", fix=f"expected {INPUTS}, or the names of the network's arguments"
        )
    n = next(iter(lengths.values())) or 0
    if n == 0:
        raise DataError(f"{path} holds no inputs", fix="give at least one")
    if LABELS in tensors and not tensors[LABELS].is_floating_point():
        tensors[LABELS] = tensors[LABELS].long()
    if chosen is not None:
        name = INPUTS if INPUTS in tensors else next(iter(tensors))
        tensors[name] = chosen.apply(tensors[name])

    def take(items: Tensor) -> dict[str, Tensor]:
        return {name: tensor[items] for name, tensor in tensors.items()}

    unlabelled = "" if LABELS in tensors else f"{path.name} holds no array {LABELS!r}"
    return Source(spec, "file", n, f"inputs from {path.name}", take, normalised=chosen, unlabelled=unlabelled)


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
    raise DataError(
        "files of inputs end in .npy, .npz or .safetensors", where=path, fix="convert it, or give a folder of images"
    )


def _to_tensor(array: Any, path: Path, name: str) -> Tensor:
    """Converts an array of any byte order to a tensor; DataError if it is not numeric."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        kind = getattr(array, "dtype", type(array).__name__)
        raise DataError(f"{name} holds {kind}, not numbers", where=path, fix="give an array of numbers")
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape))


def _noise_source(spec: str, role: Role, seed: int) -> Source:
    """Gaussian noise, for checking shapes and timing only."""
    match = _RANDOM.fullmatch(spec)
    if match is None:
        raise OptionError(f"{spec!r} is not a shape", fix="give random:POINTSxSHAPE, such as random:16x3x224x224")
    if role == "holdout":
        raise OptionError(
            "a certificate on noise says nothing about your inputs", fix="give real inputs as the holdout"
        )
    shape = [int(number) for number in match.group(1).split("x")]
    if not 0 < int(np.prod(shape, dtype=object)) <= MAX_RANDOM:
        raise OptionError(
            f"{spec!r} means {int(np.prod(shape, dtype=object)):,} numbers", fix=f"give 1 to {MAX_RANDOM:,}"
        )
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Source(spec, "random", shape[0], "random inputs (noise, no data)", lambda items: {INPUTS: noise[items]})


def _folder_source(spec: str, path: Path, role: Role, chosen: Normalisation, side: int | None) -> Source:
    """A folder of images: `train/CLASS/*` and `val/CLASS/*` by role, one subfolder per class, or unlabelled images.

    Classes are numbered in the order of their names, as in torchvision's ImageFolder.
    """
    has_parts = (path / "train").is_dir() and (path / "val").is_dir()
    index = index_folders(path) if has_parts else _index_any(path)
    first, n = (
        (0, index.n_train)
        if role == "calibration" or not has_parts
        else (index.n_train, len(index.paths) - index.n_train)
    )
    part = {"calibration": "training images", "holdout": "validation images"}[role] if has_parts else "images"

    def take(items: Tensor) -> dict[str, Tensor]:
        batches = list(folder_batches(index, first + items, mode="val", batch_size=max(1, len(items)), side=side))
        images, labels = (torch.cat(parts) for parts in zip(*batches))
        inputs = chosen.apply(images)
        return {INPUTS: inputs, LABELS: labels} if index.classes else {INPUTS: inputs}

    pixels = side or SIDE
    kinds = f"{len(index.classes)} classes" if index.classes else "without labels"
    why = "" if index.classes else f"{path} is not divided into one folder for each class"
    what = f"{part} of {path}, {pixels} x {pixels}, {kinds}"
    return Source(spec, "folder", n, what, take, has_parts, chosen, index.classes, why)


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
