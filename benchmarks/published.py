"""The networks and data of the benchmarks that look at published weights: CIFAR-10 ResNets, a sentence transformer."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sipp_lab.data.images import normalise
from sipp_lab.data.sets import load_cifar10
from sipp_lab.nets import build

BATCH = 500
SENTENCE = re.compile(r"[A-Z][\w ,;:'()\-]{20,200}[.!?]")
WORDS = range(5, 36)  # of a sentence
PER_BATCH = 32


@dataclass(frozen=True)
class Images:
    """CIFAR-10 as a published ResNet takes it. The training images come in a random order of a seed."""

    train: Tensor  # N x 3 x 32 x 32, uint8
    test: Tensor
    labels: Tensor  # of the test images

    def points(self, start: int, n: int) -> Tensor:
        """Training images, normalised."""
        return normalise(self.train[start : start + n])


def images_of(folder: Path, seed: int) -> Images:
    """The images of a folder as `get_cifar10` leaves it."""
    data = load_cifar10(folder)
    order = torch.randperm(data.n_train, generator=torch.Generator().manual_seed(seed))
    return Images(data.images[order], normalise(data.images[data.n_train :]), data.labels[data.n_train :])


def resnet(weights: Path) -> nn.Module:
    """The network that the file is named after: resnet20-cifar10.safetensors."""
    net = build(weights.name.split("-")[0], n_classes=10)
    net.load_state_dict(load_file(weights))
    return net.eval()


def outputs(net: nn.Module, batches: Any) -> Tensor:
    """The outputs on all batches, tensors or dicts, one point below the other."""
    net.eval()
    with torch.no_grad():
        return torch.cat([net(**batch) if isinstance(batch, dict) else net(batch) for batch in batches])


def accuracy(net: nn.Module, images: Images) -> float:
    """The share of right answers on the test images, in per cent."""
    return 100 * float((outputs(net, images.test.split(BATCH)).argmax(1) == images.labels).float().mean())


def moved(dense: Tensor, other: Tensor) -> float:
    """95 % of the outputs move by less than this share of their length."""
    return float(((other - dense).norm(dim=1) / dense.norm(dim=1)).quantile(0.95))


def same_neighbour(dense: Tensor, other: Tensor) -> float:
    """The share of points whose nearest other point, by the angle, is still the same, in per cent."""
    return 100 * float((_nearest(dense) == _nearest(other)).float().mean())


def _nearest(vectors: Tensor) -> Tensor:
    unit = F.normalize(vectors, dim=1)
    return (unit @ unit.T).fill_diagonal_(-2).argmax(1)


class Encoder(nn.Module):
    """A sentence's vector: the mean of the last layer over its real positions."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def encoder(folder: Path) -> Encoder:
    """The sentence transformer of a folder with a BERT model."""
    from transformers import AutoModel

    return Encoder(AutoModel.from_pretrained(folder)).eval()


def sentences(folder: Path, start: int, n: int, seed: int) -> list[dict[str, Tensor]]:
    """Batches of sentences for the tokenizer of that folder, from place `start` of a random order on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    every = _docstring_sentences()
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))[start : start + n].tolist()
    texts = sorted((every[i] for i in order), key=len)  # those of a batch are about as long: little padding
    batches = [tokenizer(texts[i : i + PER_BATCH], padding=True, return_tensors="pt") for i in range(0, n, PER_BATCH)]
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in batches]


def _docstring_sentences() -> list[str]:
    """About ten thousand different sentences: what the docstrings of Python's own library say."""
    found = set()
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "test" in path.parts or "tests" in path.parts or "site-packages" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # files that are there to be wrong
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    found.update(re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())))
    return sorted(one for one in found if SENTENCE.fullmatch(one) and len(one.split()) in WORDS)
