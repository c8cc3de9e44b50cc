"""How much a repair asks of Python and of a GPU is counted, not timed: passes of blocks, reads that wait, and bytes."""

import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sipp
from sipp.inputs.data import data_of
from sipp.repairing import repair_network
from sipp.repairing.data_split import split_batches
from sipp.repairing.repair_task import RepairTask
from sipp.results.pruned import Repaired

N_BLOCKS = 5
READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.nb(self.b(torch.relu(self.na(self.a(x))))))


@functools.cache
def counted_repair(**options: Any) -> tuple[Counter[str], Repaired]:
    """What a search for mask and weights of a residual network does, and its result."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(N_BLOCKS)))
    net = nn.Sequential(nn.Conv2d(2, 8, 3), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).eval()
    masks = sipp.prune(net, None, keep=0.3, method="lamp", floor=0.001).masks
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "forward", run)
        patch.setattr(torch, "equal", reading(torch.equal))
        for name in READS:
            patch.setattr(Tensor, name, reading(getattr(Tensor, name)))
        found = repair_network(net, masks, split, RepairTask(floor=0.0, **options))
    return count, found


def test_a_block_is_run_once_for_each_of_its_layers_and_once_behind_them() -> None:
    count, found = counted_repair()
    n_batches, n_errors = 2, 2 * 2  # those to fit and to validate on; before and after, on validation and test points
    assert len(found.record.layers) == 2 * N_BLOCKS + 2
    n_looks = 2 * 2  # the first of a part is run before the block's first layer is known to be reached
    assert count["pruned"] <= N_BLOCKS * ((2 + 1) * n_batches + n_errors)
    assert count["dense"] <= N_BLOCKS * ((2 + 1) * n_batches + n_errors + n_looks)


def test_a_gpu_is_waited_for_a_few_times_a_layer() -> None:
    """Each read of a number waits for all that was asked before: 2 in each pass, 1 in three rounds of a search."""
    count, found = counted_repair()
    assert count["reads"] <= 52 * len(found.record.layers)


class Alive(TorchDispatchMode):
    """The most bytes of tensors, made while it is on, that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                old = self.kept.get(storage._cdata)
                if old is None or old[0].expired():
                    self.now += storage.nbytes() - (0 if old is None else old[1])
                    self.kept[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.now > self.most:  # or so it seems: what was freed is looked for here alone
            self.kept = {key: known for key, known in self.kept.items() if not known[0].expired()}
            self.now = sum(n_bytes for _, n_bytes in self.kept.values())
            self.most = max(self.most, self.now)
        return made


class LinearBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


N_TOKENS, A_BATCH = 2000, 10  # so many that what the probe of two points looks at is small beside a state
A_STATE = 4 * A_BATCH * N_TOKENS * 8  # bytes of a batch between two blocks


def peak_bytes(n_batches: int, n_blocks: int) -> int:
    """Bytes at the peak of a search on so many batches."""
    torch.manual_seed(0)
    net = nn.Sequential(*(LinearBlock() for _ in range(n_blocks))).eval()
    masks = sipp.prune(net, None, keep=0.5, method="magnitude").masks
    points = torch.randn(n_batches, A_BATCH, N_TOKENS, 8)
    split = split_batches(data_of(list(points)).batches())
    options = RepairTask(error_feedback=1.0, keeps_budgets=True)
    gc.collect()
    gc.disable()
    try:
        with Alive() as alive:
            repair_network(net, masks, split, options)
    finally:
        gc.enable()
    return alive.most


def test_of_more_points_only_their_states_take_more_memory() -> None:
    """One of the dense network and one of the pruned one. What a batch takes is taken again by the next."""
    n_few, n_more = 6, 12
    few, more = (peak_bytes(n, 3) for n in (n_few, n_more))
    assert more - few <= 2 * (n_more - n_few) * A_STATE


def test_of_a_finished_block_no_tensor_of_a_pass_stays() -> None:
    n_few, n_more = 2, 5
    few, more = (peak_bytes(3, n) for n in (n_few, n_more))
    assert more - few <= (n_more - n_few) * A_STATE / 2
