"""The main job on embedded data: train a small network on digits, prune it by every method, show what it costs."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from rich import box
from rich.table import Table
from torch import Tensor, nn

from sipp.data import digits_splits, epoch_order, load_digits
from sipp.masking import hold, release
from sipp.nets import build
from sipp.progress import progress_bar
from sipp.prune import cut, rank
from sipp.pruned import Method

KEEPS = (0.5, 0.2, 0.1, 0.05, 0.02)
BATCH_SIZE = 64
TRAIN_EPOCHS = 30
RETRAIN_EPOCHS = 6
LEARNING_RATE = 0.1
RETRAIN_RATE = 0.03
MOMENTUM = 0.9
WEIGHT_DECAY = 5e-4


@dataclass(frozen=True)
class DemoResult:
    """Test accuracies of the demo: dense, and by (method, keep) before and after retraining."""

    dense: float
    before: dict[tuple[str, float], float]
    after: dict[tuple[str, float], float]


def run_demo(folder: Path, *, seed: int = 0, progress: bool = True) -> DemoResult:
    """The accuracies; trains, prunes and retrains on the digits, and writes `accuracy.png` into the folder."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # 8 x 8 images: handing work to a second thread costs more than the work
    try:
        result = _measure(seed, progress)
    finally:
        torch.set_num_threads(n_threads)
    folder.mkdir(parents=True, exist_ok=True)
    _draw(result, folder / "accuracy.png")
    return result


def _measure(seed: int, progress: bool) -> DemoResult:
    """The accuracies of the dense network and of every method at every keep."""
    data = load_digits()
    splits = digits_splits(data, seed=seed)
    train, calibration, test = (
        (data.images[part], data.labels[part]) for part in (splits.train, splits.calibration, splits.test)
    )
    torch.manual_seed(seed)
    net = build("digits-cnn")
    with progress_bar("training", TRAIN_EPOCHS, shown=progress) as advance:
        for epoch in range(TRAIN_EPOCHS):
            _train_epoch(net, _optimizer(net, _rate(LEARNING_RATE, epoch, TRAIN_EPOCHS)), train, seed, epoch)
            advance(1)
    dense = _accuracy(net, test)
    before: dict[tuple[str, float], float] = {}
    after: dict[tuple[str, float], float] = {}
    methods = get_args(Method)
    with progress_bar("pruning and retraining", len(methods) * len(KEEPS), shown=progress) as advance:
        for method in methods:
            ranking = rank(net, [calibration], method=method, seed=seed)
            for keep in KEEPS:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # rows die at 2 %: the table shows what that costs
                    pruned = cut(ranking, round(keep * ranking.n_weights), seed=seed)
                before[method, keep] = _accuracy(pruned.model, test)
                after[method, keep] = _accuracy(_retrain(pruned.model, pruned.masks, train, seed), test)
                advance(1)
    return DemoResult(dense, before, after)


def demo_table(result: DemoResult) -> Table:
    """Accuracy by method (down) and keep (across), before and after retraining; fits 80 columns."""
    title = f"digits: test accuracy in % by keep, pruned→retrained (dense: {100 * result.dense:.1f})"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("method", no_wrap=True)
    for keep in KEEPS:
        table.add_column(f"{keep:.0%}", justify="right", no_wrap=True)
    for method in get_args(Method):
        cells = (f"{100 * result.before[method, k]:.1f}→{100 * result.after[method, k]:.1f}" for k in KEEPS)
        table.add_row(method, *cells)
    return table


def _optimizer(net: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def _rate(peak: float, epoch: int, n_epochs: int) -> float:
    """A rate that falls linearly to a tenth of the peak."""
    return peak * (1 - 0.9 * epoch / n_epochs)


def _train_epoch(
    net: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], seed: int, epoch: int
) -> None:
    images, labels = data
    net.train()
    for items in epoch_order(torch.arange(len(labels)), seed=seed, epoch=epoch).split(BATCH_SIZE):
        optimizer.zero_grad()
        F.cross_entropy(net(images[items]), labels[items]).backward()
        optimizer.step()


def _retrain(model: nn.Module, masks: dict[str, Tensor], data: tuple[Tensor, Tensor], seed: int) -> nn.Module:
    """A copy of the model, trained a little with its masks held."""
    net = copy.deepcopy(model)
    optimizer = _optimizer(net, RETRAIN_RATE)
    hold(net, masks, optimizer=optimizer)
    for epoch in range(RETRAIN_EPOCHS):
        _train_epoch(net, optimizer, data, seed, epoch)
    release(net)
    return net


def _accuracy(net: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    images, labels = data
    net.eval()
    with torch.no_grad():
        return float((net(images).argmax(1) == labels).float().mean())


def _draw(result: DemoResult, path: Path) -> None:
    """Writes accuracy against keep, one line a method, before and after retraining side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, (title, values) in zip(axes, (("pruned", result.before), ("pruned and retrained", result.after))):
        for method, marker in zip(get_args(Method), "os^Dvx+"):
            axis.plot(KEEPS, [100 * values[method, keep] for keep in KEEPS], marker=marker, label=method)
        axis.axhline(100 * result.dense, color="grey", linestyle=":", label="dense")
        axis.set(xscale="log", xlabel="keep (share of prunable weights)", title=title)
        axis.set_xticks(KEEPS, [f"{keep:.0%}" for keep in KEEPS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
