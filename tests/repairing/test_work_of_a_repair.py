"""How much a repair runs and holds is counted, not timed: passes of blocks, and bytes."""

import gc
from typing import Any

import torch
from repairing.fit_points import even_masks, split_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sipp.repairing import repair_network

CALLS = list[int]()  # of all blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(x))
        return x + self.b(torch.relu(self.a(x)))


def test_a_block_is_run_once_for_each_of_its_layers_and_once_behind_them() -> None:
    """In each of both networks; and in all, before and after, on validation and test points; and in a trace."""
    n_blocks, n_batches = 5, 2  # one to fit, one to validate on
    net = nn.Sequential(*(Block() for _ in range(n_blocks))).eval()
    masks, split = even_masks(net), split_of(torch.randn(200, 8))
    CALLS.clear()
    assert len(repair_network(net, masks, split).record.layers) == 2 * n_blocks
    assert len(CALLS) <= n_blocks * (2 * (2 + 1) * n_batches + 2 * 2 * 2 + 2)


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


N_TOKENS, A_BATCH = 2000, 10  # so many that what is looked at in a trace is small beside a state
A_STATE = 4 * A_BATCH * N_TOKENS * 8  # bytes of a batch between two blocks


def peak_bytes(n_batches: int, n_blocks: int) -> int:
    """Bytes at the peak of a search on so many batches."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(n_blocks))).eval()
    masks, split = even_masks(net), split_of(list(torch.randn(n_batches, A_BATCH, N_TOKENS, 8)))
    gc.collect()
    gc.disable()
    try:
        with Alive() as alive:
            repair_network(net, masks, split)
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
