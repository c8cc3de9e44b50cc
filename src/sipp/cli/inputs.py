"""Draws the inputs of --data and --holdout, as batches that the network takes."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import Reading
from sipp.cli.sources import INPUTS, LABELS, Source, find_source
from sipp.cli.texts import N_SEQUENCES
from sipp.results import Method, words

N_HOLDOUT = 5000  # default for image folders, whose images are large
HOLDOUT_SHARE = 0.5  # of a file that is split into calibration and holdout
BLEND, HELD_BACK = "sipp-blend", 0.25  # the method that keeps this share of the inputs for its choice
# Inputs in a batch: many small ones, few large ones; fewer sequences, whose activations are large.
FEWEST, MOST, BATCH_NUMBERS, GPU_BATCH_NUMBERS, BATCH_TOKENS = 16, 1024, 2**18, 2**24, 2048


@dataclass(frozen=True)
class Points:
    """Inputs drawn from a source, as batches."""

    source: Source
    batches: list[Any]  # inputs, (inputs, labels), {name: tensor} or ({name: tensor}, labels)
    n_points: int
    words: str
    unlabelled: str  # why they have no labels

    @property
    def summary(self) -> dict[str, Any]:
        """The description of the points in a record."""
        source, normalised = self.source, self.source.normalised
        return {
            "spec": source.spec,
            "kind": source.kind,
            "what": self.words,
            "n_inputs": self.n_points,
            "normalisation": None if normalised is None else vars(normalised),
        }


def input_lines(data: Points | None, holdout: Points | None = None) -> list[str]:
    """What a command says of the inputs it read: how many of what, and how images were normalised."""
    lines = [] if data is None else [words.labelled_line("data", data.words)]
    lines += [] if holdout is None else [words.labelled_line("holdout", holdout.words)]
    return lines + image_lines(*(points for points in (data, holdout) if points is not None))


def image_lines(*drawn: Points) -> list[str]:
    """A line for each normalisation that was applied to images."""
    applied = dict.fromkeys(points.source.normalised for points in drawn)
    return [words.labelled_line("images", normalised.words) for normalised in applied if normalised is not None]


@dataclass(frozen=True)
class Reader:
    """Reads inputs for a network, with the options of a command."""

    network: nn.Module
    model: str  # as typed; its tokenizer reads text
    reading: Reading
    seed: int = 0
    batch_size: int | None = None  # None: by the size of an input

    def open(self, spec: str, option: str = "--data", *, is_holdout: bool = False) -> Source:
        """The source that `spec` names."""
        return find_source(spec, self.model, self.reading, is_holdout=is_holdout, seed=self.seed, option=option)

    def holdout(self, spec: str, n_points: int | None = None, option: str = "--holdout") -> Points:
        """Draws the holdout points of `spec`: `n_points`, or all (at most `N_HOLDOUT` images from a folder)."""
        source = self.open(spec, option, is_holdout=True)
        return self.draw(source, n_points or (N_HOLDOUT if source.kind == "folder" else None))

    def calibration(self, spec: str, asked: int | None, method: Method = "", **of_theory: Any) -> Points:
        """Draws the calibration points of `spec`, as many as --points asks for, or as the theory does.

        The options `of_theory` are those of `sipp.sample_size`.
        """
        source = self.open(spec)
        return self.draw(source, self._n_calibration(source, asked, method, of_theory))

    def calibration_and_holdout(
        self, spec: str, asked: int | None, method: Method, **of_theory: Any
    ) -> tuple[Points, Points]:
        """The same, and disjoint holdout points: the test part of the source, or half of it.

        The holdout does not depend on the number of calibration points.
        """
        source = self.open(spec)
        n_points = self._n_calibration(source, asked, method, of_theory)
        if source.has_holdout:
            return self.draw(source, n_points), self.holdout(spec, option="--data")
        n_theirs = int(source.n_points * HOLDOUT_SHARE)
        if n_theirs < 1:
            raise CommandError(
                "one input cannot be split into calibration and holdout inputs",
                where=source.where,
                fix="give more inputs, or a file of its own with --holdout",
            )
        order = self._shuffle(source)
        return self._collect(source, order[n_theirs:][:n_points]), self._collect(source, order[:n_theirs])

    def _n_calibration(
        self, source: Source, asked: int | None, method: Method, of_theory: dict[str, Any]
    ) -> int | None:
        """The number of points that --points asks for; None: all.

        By default all of a file, `N_SEQUENCES` of a text, and as many as T4 requires from a data set.
        """
        if asked is not None:
            if asked > source.n_points:
                warnings.warn(f"--points {asked}: there are only {source.n_points:,}, and all are used", stacklevel=2)
            return asked
        if source.kind in ("file", "text"):
            return N_SEQUENCES if source.kind == "text" else None
        example = self.draw(source, 1).batches[0]
        with naming_option(f"--model {self.model}, {source.where}", "see --help"):
            n = sipp.sample_size(self.network, example, **of_theory)
        return math.ceil(n / (1 - HELD_BACK)) if method == BLEND else n

    def draw(self, source: Source, n_points: int | None) -> Points:
        """Draws `n_points` without replacement, by the seed; None: all, in order."""
        is_whole = n_points is None or n_points >= source.n_points
        return self._collect(source, torch.arange(source.n_points) if is_whole else self._shuffle(source)[:n_points])

    def _shuffle(self, source: Source) -> Tensor:
        return torch.randperm(source.n_points, generator=torch.Generator().manual_seed(self.seed))

    def _collect(self, source: Source, items: Tensor) -> Points:
        """Batches of these items for the network, with floats in its own dtype."""
        tensors, parameters = source.take(items), list(self.network.parameters())
        labels = tensors.pop(LABELS, None)
        dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
        cast = sorted({str(t.dtype)[6:] for t in tensors.values() if t.is_floating_point() and t.dtype != dtype})
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        device = parameters[0].device if parameters else torch.device("cpu")
        step = self.batch_size or min(_points_per_batch(tensor, device) for tensor in tensors.values())
        batches: list[Any] = []
        for start in range(0, len(items), step):
            part = {name: tensor[start : start + step] for name, tensor in tensors.items()}
            inputs: Any = part[INPUTS] if set(part) == {INPUTS} else part
            batches.append(inputs if labels is None else (inputs, labels[start : start + step]))
        n = len(items)
        text = f"{n:,} {source.what}" if n == source.n_points else f"{n:,} of {source.n_points:,} {source.what}"
        text += f", {', '.join(cast)} read as {str(dtype)[6:]}" if cast else ""
        n_outputs = None if device.type == "meta" else self._n_outputs(source, tensors, device)
        if not source.classes or n_outputs in (None, len(source.classes)):
            return Points(source, batches, n, text, source.unlabelled)
        why = f"the folder has {len(source.classes)} classes, the network {n_outputs} outputs"
        warnings.warn(f"{source.where}: labels are ignored, because {why}", stacklevel=2)
        return Points(source, [inputs for inputs, _ in batches], n, text, why)

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


def _points_per_batch(tensor: Tensor, device: torch.device) -> int:
    """The number of inputs in a batch."""
    if not tensor.is_floating_point():
        is_tokens = tensor.dim() == 2
        return max(1, min(FEWEST, BATCH_TOKENS // tensor.shape[1])) if is_tokens else FEWEST
    if tensor.element_size() < 4 and device.type == "cpu":  # slow in torch, and on some processors it crashes
        return FEWEST
    most = BATCH_NUMBERS if device.type == "cpu" else GPU_BATCH_NUMBERS
    return min(max(most // max(1, tensor[0].numel()), FEWEST), MOST)
