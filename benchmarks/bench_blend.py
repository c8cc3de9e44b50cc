"""Prints how far `sipp-blend`, `magnitude` and `sipp-det` move a network's output before any repair.

    python benchmarks/bench_blend.py --nets mlp lstm
    python benchmarks/bench_blend.py --nets resnet20 resnet56 --weights . --data data/
    python benchmarks/bench_blend.py --nets minilm --encoder all-MiniLM-L6-v2/
    python benchmarks/bench_blend.py --nets digits resnet20 --weights . --data data/ --dead-rows

Each cell: 95 % of the outputs on new points move by less than this share of their length (and the accuracy, where there
are labels): the mean of three rounds, each with a calibration sample and new points of its own. The difference is the
blend less the better of the other two, round by round; the noise is how far its three values spread. All have the
floor on, which the blend has by itself: so scores are compared, not the price of rows that do not die.
`--dead-rows`: rows that no weight of is left, at keep 0.02 with the floor on, for every method.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import table
from published import encoder, images_of, moved, outputs, resnet, sentences
from torch import Tensor, nn

from sipp.pruning import cut, rank
from sipp.results.options import PruneOptions
from sipp.scoring.methods import METHODS
from sipp.scoring.task import task_of
from sipp.verbs.record import pruned_of

OTHERS = ("magnitude", "sipp-det")
BLEND = "sipp-blend"
N_SAMPLES = 3
N_IMAGES, N_TEST = 256, 2000
N_SENTENCES, N_NEW_SENTENCES = 192, 400
N_DIGITS = 200
FLOOR, SPARSEST = 0.1, 0.02


@dataclass(frozen=True)
class Case:
    """A trained network, calibration samples and new points."""

    net: nn.Module
    samples: list[Any]
    new: Any
    labels: Tensor | None


class Rows(nn.Module):
    """Reads an 8 x 8 image row by row with an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 64, num_layers=2, batch_first=True)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.view(-1, 8, 8))[0][:, -1])


def digits(make: Callable[[], nn.Module]) -> Case:
    """The network, trained on 1,000 digits; others for calibration and for the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.from_numpy(found.data).float() / 16, torch.from_numpy(found.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(40):
        for at in torch.randperm(1000).split(50):
            optimizer.zero_grad()
            F.cross_entropy(net(x[:1000][at]), y[:1000][at]).backward()
            optimizer.step()
    samples = [list(x[i * N_DIGITS : (i + 1) * N_DIGITS].split(50)) for i in range(N_SAMPLES)]
    return Case(net.eval(), samples, [x[1000:]], y[1000:])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    layers = (nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Flatten(), nn.Linear(512, 10))


def case_of(name: str, options: argparse.Namespace) -> Case:
    """The network of that name, with its data."""
    if name.startswith("resnet"):
        images = images_of(options.data, 0)
        samples = [list(images.points(i * N_IMAGES, N_IMAGES).split(64)) for i in range(N_SAMPLES)]
        net = resnet(options.weights / f"{name}-cifar10.safetensors")
        return Case(net, samples, images.test[:N_TEST].split(250), images.labels[:N_TEST])
    if name == "minilm":
        folder = options.encoder
        samples = [sentences(folder, i * N_SENTENCES, N_SENTENCES, 0) for i in range(N_SAMPLES)]
        new = sentences(folder, N_SAMPLES * N_SENTENCES, N_NEW_SENTENCES, 0)
        return Case(encoder(folder), samples, new, None)
    return digits({"mlp": mlp, "lstm": Rows, "digits": cnn}[name])


def measured(case: Case, method: str, keeps: list[float]) -> dict[float, list[tuple[float, float, str]]]:
    """By keep, for each calibration sample: the movement, the accuracy, the blend that was taken."""
    dense = outputs(case.net, case.new)
    parts = torch.arange(len(dense)).chunk(N_SAMPLES)
    found: dict[float, list[tuple[float, float, str]]] = {keep: [] for keep in keeps}
    for data, at in zip(case.samples, parts):
        ranking = rank(task_of(case.net, data), PruneOptions(method=method, floor=FLOOR))
        for keep in keeps:
            pruned = cut(ranking, round(keep * ranking.n_weights), seed=0)
            got = outputs(pruned.model, case.new)[at]
            right = 100 * float((got.argmax(1) == case.labels[at]).float().mean()) if case.labels is not None else 0.0
            blend = "" if pruned.choice is None else pruned.choice.taken.name
            found[keep].append((moved(dense[at], got), right, blend))
    return found


def blend_lines(name: str, case: Case, keeps: list[float]) -> list[list[str]]:
    """One line a keep."""
    results = {method: measured(case, method, keeps) for method in (*OTHERS, BLEND)}
    lines = []
    for keep in keeps:
        cells = [name, f"{keep:g}"]
        means = {}
        for method, by_keep in results.items():
            means[method] = statistics.mean(one[0] for one in by_keep[keep])
            right = statistics.mean(one[1] for one in by_keep[keep])
            cells.append(f"{means[method]:.3f}" + ("" if case.labels is None else f" / {right:.1f} %"))
        best = min(OTHERS, key=lambda method: means[method])
        gaps = [ours[0] - theirs[0] for ours, theirs in zip(results[BLEND][keep], results[best][keep])]
        gap, noise = statistics.mean(gaps), statistics.stdev(gaps)
        word = "ahead" if gap < -noise else "behind" if gap > noise else "level"
        blends = ", ".join(sorted({one[2] for one in results[BLEND][keep]}))
        lines.append([*cells, f"{gap:+.3f}", f"{noise:.3f}", word, blends])
        print(lines[-1], flush=True)
    return lines


def dead_lines(name: str, case: Case) -> list[list[str]]:
    """One line a method: rows and layers that died with the floor on, and off."""
    data = [(x, y) for x, y in zip(case.samples[0], _labels(case, case.samples[0]))]
    lines = []
    for row in METHODS:
        counts = []
        for floor in (FLOOR, 0):
            ranking = rank(task_of(case.net, data), PruneOptions(method=row.name, floor=floor))
            made = pruned_of(ranking, cut(ranking, round(SPARSEST * ranking.n_weights), seed=0))
            counts.append(str(sum(layer.dead_rows for layer in made.layers)))
        lines.append([name, row.name, *counts])
        print(lines[-1], flush=True)
    return lines


def _labels(case: Case, batches: list[Tensor]) -> list[Tensor]:
    """The classes that the dense network gives: labels for methods that want some."""
    return [outputs(case.net, [batch]).argmax(1) for batch in batches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=["mlp", "lstm"])
    parser.add_argument("--weights", type=Path, default=Path("."), help="folder with the published ResNets")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.7, 0.5, 0.3])
    parser.add_argument("--dead-rows", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    cases = [(name, case_of(name, options)) for name in options.nets]
    if options.dead_rows:
        lines = [line for name, case in cases for line in dead_lines(name, case)]
        table(f"rows without a weight at keep {SPARSEST}", ["network", "method", f"floor {FLOOR}", "floor off"], lines)
        return
    lines = [line for name, case in cases for line in blend_lines(name, case, options.keep)]
    table(
        "95 % of outputs move less than / accuracy, before any repair; mean of three rounds",
        ["network", "keep", *OTHERS, BLEND, "difference", "noise", "the blend is", "blends taken"],
        lines,
    )


if __name__ == "__main__":
    main()
