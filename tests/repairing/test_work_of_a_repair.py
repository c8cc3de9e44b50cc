"""How much a repair asks of Python and of a GPU is counted, not timed: passes of blocks, and reads that wait for it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.inputs.data import data_of
from sipp.repairing.data_split import split_batches
from sipp.repairing.repair_network import RepairedNetwork, repair_network
from sipp.repairing.repair_options import RepairOptions

N_BLOCKS = 5
READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.nb(self.b(torch.relu(self.na(self.a(x))))))


def counted_repair(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Counter[str], RepairedNetwork]:
    """What a search for mask and weights of a residual network does, and its result."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(N_BLOCKS)))
    net = nn.Sequential(nn.Conv2d(2, 8, 3), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).eval()
    masks = sipp.prune(net, None, keep=0.3, method="lamp", floor=0.0).masks
    split = split_batches(data_of(torch.randn(200, 2, 8, 8)).batches())
    count, dense = Counter[str](), {id(module) for module in net.modules()}
    forward = Block.forward

    def run(self: Block, x: Tensor) -> Tensor:
        count["dense" if id(self) in dense else "pruned"] += 1
        return forward(self, x)

    def reading(own: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **options: Any) -> Any:
            count["reads"] += 1
            return own(*args, **options)

        return read

    with monkeypatch.context() as patch:
        patch.setattr(Block, "forward", run)
        patch.setattr(torch, "equal", reading(torch.equal))
        for name in READS:
            patch.setattr(Tensor, name, reading(getattr(Tensor, name)))
        found = repair_network(net, masks, split, RepairOptions(floor=0.0, **options))
    return count, found


def test_a_block_is_run_once_for_each_of_its_layers_and_once_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    count, found = counted_repair(monkeypatch)
    n_trials = len(found.trials)
    n_batches = n_trials + 2 + 3  # over all fits: to fit; to fit and to choose; to fit all, with those that judged
    n_errors = n_trials + 2 * 2
    assert n_trials == 5 and len(found.layers) == 2 * N_BLOCKS + 2
    assert count["pruned"] <= N_BLOCKS * ((2 + 1 + 1) * n_batches + n_errors)  # 1: for the layer behind all blocks


def test_another_trial_asks_the_dense_network_for_its_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has to ask for the targets, in one pass, and for its way through the blocks."""
    (alone, _), (tried, found) = (
        counted_repair(monkeypatch, **options)
        for options in ({"error_feedbacks": (1.0,), "budgets": ("given",)}, {"error_feedbacks": (1.0, 0.25)})
    )
    assert tried["dense"] - alone["dense"] <= N_BLOCKS * (len(found.trials) + 4)


def test_a_gpu_is_waited_for_a_few_times_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of a number waits for all that was asked before: 2 in each pass, 1 in three rounds of a search."""
    count, found = counted_repair(monkeypatch)
    n_fits = len(found.trials) + 2
    assert count["reads"] <= 28 * n_fits * len(found.layers)
