"""Finds the inputs that --data and --holdout name, and draws batches of them that the network takes."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.images import USUAL, Normalisation, index_images, normalisation_of, read_images
from sipp.cli.options import DEFAULT_ROOT, KINDS, Reading
from sipp.cli.sources import INPUTS, LABELS, Source, array_file, source_of
from sipp.cli.texts import N_SEQUENCES, is_language_model, is_text, sentences, sequences
from sipp.errors import DataError
from sipp.results import HELD_BACK_ONE_IN, Method, numerics, words
from sipp_lab.data.sets import load_cifar10, load_digits
from sipp_lab.nets import NETS

N_HOLDOUT = 5000  # default for image folders, whose images are large
BLEND = "sipp-blend"  # the method that keeps some of the inputs for its choice
IMAGENET_SIDE = 224  # pixels, the default of a folder of images


@dataclass(frozen=True)
class Drawn:
    """Inputs drawn from a source, as batches."""

    source: Source
    batches: list[Any]  # inputs, (inputs, labels), {name: tensor} or ({name: tensor}, labels)
    n_inputs: int
    unlabelled: str  # why they have no labels

    @property
    def words(self) -> str:
        """How many of what."""
        n, source = self.n_inputs, self.source
        return f"{n:,} {source.what}" if n == source.n_inputs else f"{n:,} of {source.n_inputs:,} {source.what}"

    @property
    def example(self) -> Any:
        """The inputs of the first batch, without labels."""
        return self.batches[0][0] if isinstance(self.batches[0], tuple) else self.batches[0]


def input_lines(data: Drawn | None, holdout: Drawn | None = None) -> list[str]:
    """What a command says of the inputs it read: how many of what, and how images were normalised."""
    drawn = {"data": data, "holdout": holdout}
    lines = [words.labelled_line(name, one.words) for name, one in drawn.items() if one is not None]
    applied = dict.fromkeys(one.source.normalised for one in drawn.values() if one is not None)
    return lines + [words.labelled_line("images", used.words) for used in applied if used is not None]


def summary_of(drawn: Drawn | None) -> dict[str, Any] | None:
    """The description of inputs in a record; None if there are none."""
    if drawn is None:
        return None
    of, about = drawn.source, {"what": drawn.words, "n_inputs": drawn.n_inputs}
    return {"spec": of.spec, "kind": of.kind, **about, "normalisation": of.normalised}


@dataclass(frozen=True)
class Reader:
    """Reads inputs for a network, with the options of a command."""

    network: nn.Module
    model: str  # as typed; its tokenizer reads text
    reading: Reading
    seed: int = 0

    def open(self, spec: str, option: str = "--data", *, is_holdout: bool = False) -> Source:
        """The source that an option names.

        If it has a test part, a holdout comes from it and calibration from the training part, because a network from
        elsewhere may have been trained on all of that.
        """
        with naming_option(f"{option} {spec}", f"give {KINDS}"):
            return replace(self._find(spec, is_holdout), option=option, spec=spec)

    def holdout(self, spec: str, n: int | None = None, option: str = "--holdout") -> Drawn:
        """Draws `n` inputs that are new to the network, or all (at most `N_HOLDOUT` images from a folder)."""
        source = self.open(spec, option, is_holdout=True)
        return self.draw(source, n or (N_HOLDOUT if source.kind == "folder" else None))

    def calibration(self, spec: str, asked: int | None, method: Method = "", **of_theory: Any) -> Drawn:
        """Draws as many inputs as --points asks for.

        By default all of a file, `N_SEQUENCES` of a text, and as many as T4 requires from a data set. The options
        `of_theory` are those of `sipp.sample_size`.
        """
        source = self.open(spec)
        if asked is not None and asked > source.n_inputs:
            warnings.warn(f"--points {asked}: there are only {source.n_inputs:,}, and all are used", stacklevel=2)
        elif asked is None and source.kind == "text":
            asked = N_SEQUENCES
        elif asked is None and source.kind != "file":
            with naming_option(f"--model {self.model}, {source.where}", "see --help"):
                asked = sipp.sample_size(self.network, self.draw(source, 1).batches[0], **of_theory)
            asked = math.ceil(asked / (1 - 1 / HELD_BACK_ONE_IN)) if method == BLEND else asked
        return self.draw(source, asked)

    def draw(self, source: Source, n: int | None, batch_size: int | None = None) -> Drawn:
        """Draws `n` inputs without replacement, by the seed; None: all, in order."""
        items = torch.arange(source.n_inputs)
        if n is not None and n < source.n_inputs:
            items = torch.randperm(source.n_inputs, generator=torch.Generator().manual_seed(self.seed))[:n]
        tensors, parameters = source.take(items), list(self.network.parameters())
        labels = tensors.pop(LABELS, None)
        dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        device = parameters[0].device if parameters else torch.device("cpu")
        step = batch_size or min(numerics.points_per_batch(tensor, device) for tensor in tensors.values())
        batches: list[Any] = []
        for start in range(0, len(items), step):
            part = {name: tensor[start : start + step] for name, tensor in tensors.items()}
            inputs: Any = part[INPUTS] if set(part) == {INPUTS} else part
            batches.append(inputs if labels is None else (inputs, labels[start : start + step]))
        n_outputs = None if device.type == "meta" else self._n_outputs(source, tensors, device)
        if not source.classes or n_outputs in (None, len(source.classes)):
            return Drawn(source, batches, len(items), source.unlabelled)
        why = f"the folder has {len(source.classes)} classes, the network {n_outputs} outputs"
        warnings.warn(f"{source.where}: labels are ignored, because {why}", stacklevel=2)
        return Drawn(source, [inputs for inputs, _ in batches], len(items), why)

    def _n_outputs(self, source: Source, tensors: dict[str, Tensor], device: torch.device) -> int | None:
        """The number of classes in the output, None if it is not classes; CommandError if the network cannot run."""
        first = {name: tensor[:1].clone().to(device) for name, tensor in tensors.items()}
        shapes = ", ".join(f"{name}: {str(t.dtype)[6:]} {' x '.join(map(str, t.shape))}" for name, t in first.items())
        try:
            with torch.no_grad(), torch.random.fork_rng():
                output = self.network(first[INPUTS]) if set(first) == {INPUTS} else self.network(**first)
            logits = getattr(output, "logits", output)
            return logits.shape[1] if isinstance(logits, Tensor) and logits.dim() == 2 else None
        except Exception as error:  # user code may raise anything
            raise CommandError(
                f"{self.model} cannot take this data ({type(error).__name__}: {error})",
                where=f"{source.where}, one input is {shapes}",
                fix=f"give inputs in the shape and type the network takes; a single array is named {INPUTS!r}, "
                "tensors under other names are passed as keywords",
            ) from error

    def _find(self, spec: str, is_holdout: bool) -> Source:
        chosen, path, (name, _, root) = normalisation_of(self.reading.normalise), Path(spec), spec.partition(":")
        is_set, asked = name in ("digits", "cifar10"), self.reading
        if asked.size is not None and (is_set or not path.is_dir()):
            raise CommandError(f"{spec} is not a folder of images", where=f"--size {asked.size}", fix="leave it out")
        is_tokens = not is_set and path.exists() and is_text(path) and is_language_model(self.model)
        if asked.length is not None and not is_tokens:
            raise DataError(
                "--length cuts text for a causal language model, and this is not one",
                fix="leave it out, or give --model hf:DIR of one and text",
            )
        is_sentences = not is_tokens and path.is_file() and path.suffix == ".txt"
        if chosen is not None and (is_tokens or is_sentences):
            raise CommandError(f"{spec} holds no images", where=f"--normalise {asked.normalise}", fix="leave it out")
        if is_tokens:
            ids, what = sequences(path, self.model, asked.length, is_holdout, self.seed)
            return source_of("text", {"input_ids": ids}, what)
        if is_sentences:
            return source_of("file", sentences(path, self.model), f"sentences of {path.name}")
        if is_set:
            return _image_set(name, Path(root) if root else DEFAULT_ROOT, is_holdout, chosen)
        if path.is_file():
            return array_file(path, chosen)
        if not path.is_dir():
            raise DataError(f"{spec} is neither a file, a folder nor the name of a data set", fix=f"give {KINDS}")
        own_side = NETS[self.model].input_shape[-1] if self.model in NETS else IMAGENET_SIDE
        side = asked.size or (None if own_side == IMAGENET_SIDE else own_side)
        return _image_folder(path, is_holdout, chosen or USUAL, side)


def _image_set(name: str, root: Path, is_holdout: bool, chosen: Normalisation | None) -> Source:
    """A built-in set: its training part for calibration, its test part as holdout."""
    data = load_digits() if name == "digits" else load_cifar10(root)
    normalised = chosen or (USUAL if data.images.dtype == torch.uint8 else None)
    first, n = (data.n_train, data.n_test) if is_holdout else (0, data.n_train)

    def take(items: Tensor) -> dict[str, Tensor]:
        images = data.images[first + items]
        return {INPUTS: images if normalised is None else normalised.apply(images), LABELS: data.labels[first + items]}

    what = f"{'test' if is_holdout else 'training'} images of {name}"
    return Source("built-in", n, what, take, has_holdout=True, normalised=normalised)


def _image_folder(path: Path, is_holdout: bool, normalised: Normalisation, side: int | None) -> Source:
    """A folder of images; of one with `train` and `val`, the latter is the holdout."""
    index = index_images(path)
    has_parts, classes = index.n_test > 0, index.classes
    is_rest = has_parts and is_holdout
    first, n = (index.n_train, index.n_test) if is_rest else (0, index.n_train)

    def take(items: Tensor) -> dict[str, Tensor]:
        images, labels = read_images(index, first + items, side)
        return {INPUTS: normalised.apply(images)} | ({LABELS: labels} if classes else {})

    part = "images" if not has_parts else "validation images" if is_rest else "training images"
    shown = side or IMAGENET_SIDE
    what = f"{part} of {path}, {shown} x {shown}, " + (f"{len(classes)} classes" if classes else "without labels")
    why = "" if classes else f"{path} is not divided into one folder for each class"
    return Source("folder", n, what, take, has_parts, normalised, classes, why)
