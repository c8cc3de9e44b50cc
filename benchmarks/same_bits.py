"""Hashes of scores, masks, weights, bounds and certificates on fixed networks.

They are equal before and after a change that should change no number:

python benchmarks/same_bits.py > before.json       # then change the code
python benchmarks/same_bits.py --against before.json
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import sipp
from sipp.runtime import timing
from sipp.runtime.kernel import PreparedKernel

METHODS = (
    "sipp-blend",
    "sipp-det",
    "sipp-rand",
    "sipp-hybrid",
    "sipp-simple",
    "magnitude",
    "snip",
    "random",
    "wanda",
    "lamp",
    "obs",
)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 10, num_layers=2, batch_first=True)
        self.attend = nn.MultiheadAttention(10, 2, batch_first=True)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        a, _ = self.attend(h, h, h)
        return self.head(a[:, -1])


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Networks of all layer types with their points, the same in every run."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))
    cnn = nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2, bias=False), nn.BatchNorm2d(12), nn.ReLU(), Residual(12),
        nn.Conv2d(12, 24, 3, groups=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5),
    ).eval()  # fmt: skip
    made = {
        "mlp": (mlp, torch.rand(160, 20)),
        "mlp signed": (copy.deepcopy(mlp), torch.randn(160, 20)),
        "cnn": (cnn, torch.randn(64, 3, 13, 13)),
        "reader": (Reader().eval(), torch.randn(48, 7, 6)),
    }
    return made


@contextmanager
def first_kernels() -> Iterator[None]:
    """A context in which `sparse` takes its first kernel of each layer, and no clock decides."""
    with (
        mock.patch.object(timing, "dense_time", return_value=math.inf),
        mock.patch.object(timing, "race", lambda fast, dense: (fast(), ([1e-3, 1e-3], [1.0, 1.0]))[1]),
        mock.patch.object(
            PreparedKernel, "time_and_set_threads", lambda kernel, limit=math.inf: (kernel.alone(), 1.0)[1]
        ),
    ):
        yield


def digest(value: Any) -> str:
    """A hash of a tensor's bits, or of a value's text."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        return hashlib.sha256(
            str(value.dtype).encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16]
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def found() -> Iterator[tuple[str, str]]:
    """(what, its hash), one after another."""
    for name, (model, points) in networks().items():
        labels = torch.arange(len(points)) % 4
        data = [(points[i : i + 16], labels[i : i + 16]) for i in range(0, len(points), 16)]
        for reduce in ("max", "mean"):
            for key, scores in sipp.sensitivity(model, data, reduce=reduce).items():
                yield f"{name}: sensitivity {reduce} {key}", digest(scores)
        yield f"{name}: sample size", digest(sipp.sample_size(model, points[:2], delta=1e-16))
        for method in METHODS:
            for keep in (0.5, 0.1):
                pruned = sipp.prune(model, data, keep=keep, method=method, seed=3)
                where = f"{name}: {method} {keep}"
                for key, mask in pruned.masks.items():
                    yield f"{where} mask {key}", digest(mask)
                    yield f"{where} weight {key}", digest(pruned.model.get_parameter(key))
                yield (
                    f"{where} layers",
                    digest(
                        [(x.name, x.kept, x.strategies, x.eps, x.bound, x.kappa, x.eps_measured) for x in pruned.layers]
                    ),
                )
                yield (
                    f"{where} bound",
                    digest(
                        [pruned.bound.epsilon, *(part and asdict(part) for part in (pruned.guarantee, pruned.measured))]
                    ),
                )
        fixed = sipp.repair(model, pruned, data, steps=3)
        for key in fixed.masks:
            yield f"{name}: repaired {key}", digest(fixed.model.get_parameter(key))
        with first_kernels():  # whichever wins a race must not decide
            yield f"{name}: sparse", digest(sipp.sparse(pruned.model, points[:8])(points[:8]))
        fresh = torch.randn(100, *points.shape[1:], generator=torch.Generator().manual_seed(9))
        certificate = sipp.certify(model, pruned.model, fresh, share=0.05, confidence=0.95)
        yield f"{name}: certificate", digest((certificate.epsilon, certificate.n, certificate.violations))
        best = sipp.prune_to(model, data, fresh, epsilon=0.5, share=0.1, confidence=0.9, method="sipp-hybrid")
        yield (
            f"{name}: prune_to",
            digest([(key, digest(mask)) for key, mask in (best.pruned.masks if best.pruned else {}).items()]),
        )
        given = sipp.assess(model, pruned.model, data)
        yield f"{name}: assess", digest([(x.eps, x.bound) for x in given.layers])
        sound = sipp.assess(model, pruned.model, data, bound="sound", holdout=fresh).bound
        yield f"{name}: sound bound", digest(None if sound.epsilon is None else f"{sound.epsilon:.9g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # sums of several threads come in another order
    now = dict(found())
    if given.against is None:
        print(json.dumps(now, indent=1))
        return
    before = json.loads(given.against.read_text())
    changed = [key for key in before if now.get(key) != before[key]]
    print(f"{len(before)} hashes, {len(changed)} differ, {len(set(now) - set(before))} new")
    print(*changed[:20], sep="\n")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
