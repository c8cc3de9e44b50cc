"""What the checks cost: forward passes, hashed points and copied bytes of one scoring, counted rather than timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sipp
from sipp.inputs import hashes, recording
from sipp.inputs.batches import Batch, Weight, WeightUse
from sipp.inputs.layers import attention, find_prunable_layers, recurrent
from sipp.inputs.trace import read_uses
from sipp.results import numerics
from sipp.scoring.kernels.cpu import kernel as cpu

N, BATCH = 48, 16
FEW = 3  # points that are looked at for each form of input, in two orders


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    ).eval()


def images(n: int = N) -> Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class _Copies(TorchDispatchMode):
    """Counts the points that are cloned."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.n_points = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and out.shape[1:] == self.shape:
            self.n_points += len(out)
        return out


@dataclass
class Costs:
    """Sizes of the forward passes, in order; points whose content was read for a hash; points that were copied."""

    passes: list[int] = field(default_factory=list)
    n_hashed: int = 0
    n_copied: int = 0


@contextmanager
def counted(model: nn.Module, monkeypatch: pytest.MonkeyPatch, points: Tensor) -> Iterator[Costs]:
    costs, real = Costs(), hashes._rows

    def rows(part: Any) -> list[bytes]:
        costs.n_hashed += len(part)
        return real(part)

    monkeypatch.setattr(hashes, "_rows", rows)
    handle = model.register_forward_pre_hook(lambda module, args: costs.passes.append(len(args[0])))
    with _Copies(points.shape[1:]) as copies:
        yield costs
    costs.n_copied = copies.n_points
    handle.remove()


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_sensitivities_take_one_pass_and_three_points_twice(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, points = network(), images()
    with counted(model, monkeypatch, points) as costs:
        sipp.sensitivity(model, list(points.split(BATCH)), reduce=reduce)
    assert costs.passes == [FEW, FEW, BATCH, BATCH, BATCH]
    assert costs.n_hashed == N
    assert costs.n_copied == N + 2 * FEW  # each pass is given a copy


def test_a_short_last_batch_is_no_new_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model, points = network(), images(BATCH + 3)
    with counted(model, monkeypatch, points) as costs:
        sipp.sensitivity(model, list(points.split(BATCH)))
    assert costs.passes == [FEW, FEW, BATCH, 3]


def test_each_form_of_input_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, points = nn.Linear(6, 3), torch.rand(4, 5, 6)
    with counted(model, monkeypatch, points) as costs:
        sipp.sensitivity(model, [points, points[:, :3], points + 1, points[:, :3] + 1])
    assert costs.passes == [FEW, FEW, 4, 2, FEW, FEW, 4, 4, 4]  # two points of the first batch by themselves, too


def test_a_pruning_scores_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, points = network(), images()
    with counted(model, monkeypatch, points) as costs:
        sipp.prune(model, list(points.split(BATCH)), keep=0.5, method="sipp-det")
    assert costs.passes == [FEW, FEW, BATCH, BATCH, BATCH, BATCH, BATCH]  # and both networks on one batch, at the end
    assert costs.n_hashed == N
    assert costs.n_copied == N + 2 * FEW + 3 * BATCH  # and a copy is kept of the points on which both are run


class Sorted(nn.Module):
    """Takes its points only with the largest first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[1:, 0] > x[:-1, 0]).any()):
            raise RuntimeError("not sorted")
        return self.linear(x)


def test_a_model_that_asks_for_an_order_of_points_is_probed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reversed batch is refused; then the last point but one takes the place of the last."""
    model, points = Sorted(), torch.rand(8, 6).sort(0, descending=True).values
    with counted(model, monkeypatch, points) as costs:
        sipp.sensitivity(model, [points])
    assert costs.passes == [FEW, FEW, FEW, 8]


class OwnLSTM(nn.LSTM):
    """Of another type than torch's, so that its output is checked."""


@pytest.mark.parametrize("kind", [nn.LSTM, OwnLSTM])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_no_recurrence_is_run_again(n_layers: int, kind: type[nn.LSTM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Except to check the output of a few points, if the layer is not torch's own."""
    replayed, real = [], recurrent.FUSED["LSTM"]
    monkeypatch.setitem(recurrent.FUSED, "LSTM", lambda x, *rest: replayed.append(len(x)) or real(x, *rest))
    torch.manual_seed(0)
    sipp.sensitivity(kind(3, 4, n_layers, batch_first=True), list(torch.rand(N, 5, 3).split(BATCH)))
    assert replayed == ([] if kind is nn.LSTM else [FEW] * n_layers)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_states_that_were_seen_are_those_of_a_replay(
    bidirectional: bool, batch_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, 3, batch_first=batch_first, bidirectional=bidirectional)
    model = lstm if batch_first else TimeFirst(lstm)
    points = torch.rand(N, 5, 3)
    seen = sipp.sensitivity(model, [points])
    replayed, real = [], recurrent.FUSED["LSTM"]
    monkeypatch.setitem(recurrent.FUSED, "LSTM", lambda x, *rest: replayed.append(len(x)) or real(x, *rest))
    monkeypatch.setattr(recording, "_BY_ID", {})
    again = sipp.sensitivity(model, [points])
    assert replayed.count(N) == 2 * (1 + bidirectional)  # of the inner layers
    assert all(torch.equal(again[name], score) for name, score in seen.items())


def test_each_weight_of_a_recurrence_is_met_once_a_pass() -> None:
    model, met = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), list[str]()
    batch = Batch(0, "batch 0", (torch.rand(4, 5, 3),), {}, None, 4)

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        met.append(weight.name)

    read_uses(model, find_prunable_layers(model), batch, on_use)
    assert sorted(met) == sorted(recurrent.recurrent_weights(model))


class TimeFirst(nn.Module):
    """Gives an LSTM its points with their steps first."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.transpose(0, 1))[0].transpose(0, 1)


class Attends(nn.Module):
    """Attention of points to themselves."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class ReadsTwice(nn.MultiheadAttention):
    """Multiplies the output projection by something else as well."""

    def forward(self, query: Tensor, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        nn.functional.linear(query.abs().flatten(0, 1), self.out_proj.weight)
        return super().forward(query, *args, **options)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, ReadsTwice])
def test_attention_is_not_computed_again(kind: type[nn.MultiheadAttention], monkeypatch: pytest.MonkeyPatch) -> None:
    """Except to check the output of a few points, or if the input of the projection is unclear."""
    computed, real = [], attention._before_projection
    monkeypatch.setattr(
        attention, "_before_projection", lambda m, given: computed.append(len(given["query"])) or real(m, given)
    )
    torch.manual_seed(0)
    model, points = Attends(kind(6, 2, batch_first=True)), torch.randn(N, 5, 6)
    scores = sipp.sensitivity(model, list(points.split(BATCH)))
    assert computed == ([] if kind is nn.MultiheadAttention else [FEW, FEW, FEW, BATCH, BATCH, BATCH])
    own = real(model.attention, {"query": points, "key": points, "value": points} | _NO_MASKS).detach()
    alone = nn.Linear(6, 6)
    alone.weight.data = model.attention.out_proj.weight.data
    expected = sipp.sensitivity(alone, [own])["weight"]
    torch.testing.assert_close(scores["attention.out_proj.weight"], expected, rtol=1e-5, atol=0)


_NO_MASKS = {"key_padding_mask": None, "attn_mask": None, "is_causal": False}


def test_a_hook_on_some_points_does_not_change_what_a_recurrence_met() -> None:
    """Such a hook changes what the layers behind see; the hidden weights meet the states as they are."""
    torch.manual_seed(0)
    model, points = nn.LSTM(3, 4, 2, batch_first=True), torch.rand(8, 5, 3)
    points[4] = 5.0
    expected = sipp.sensitivity(model, [points])
    model.register_forward_hook(lambda m, args, out: (torch.where(args[0][:, :1, :1] > 4, 9.0, out[0]), out[1]))
    found = sipp.sensitivity(model, [points])
    assert all(torch.equal(found[name], score) for name, score in expected.items())


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_weights_are_laid_out_once_a_score(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out, real = [], cpu.pack_weights
    monkeypatch.setattr(cpu, "pack_weights", lambda weight: laid_out.append(weight.shape) or real(weight))
    sipp.sensitivity(network(), list(images().split(BATCH)), reduce=reduce)
    assert laid_out == [(1, 4, 27), (1, 5, 64)]


class _Operations(TorchDispatchMode):
    """Counts torch's operations."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def n_operations(n_batches: int) -> int:
    model, batches = network(), list(images(n_batches * BATCH).split(BATCH))
    with _Operations() as operations:
        sipp.sensitivity(model, batches)
    return operations.n


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_small_operations_do_not_grow_unseen(set_threads: Callable[[int], None]) -> None:
    """Each takes microseconds, and so many of them longer than the kernels. Nine are the network's own.

    On one thread: each further one has ratios of its own, which are copied and joined.
    """
    set_threads(1)
    n_operations(1)  # places that are looked at are kept
    first, second = n_operations(1), n_operations(2)
    assert second - first == 64  # of a further batch, for two weights
    assert first == 290  # with the map, and all that is done once


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_score_leaves_nothing_to_the_garbage_collector(n_threads: int, set_threads: Callable[[int], None]) -> None:
    """Hooks that refer to each other would stay, with what they saw, until it runs; and it would run more often."""
    set_threads(n_threads)
    model, batches = network(), list(images().split(BATCH))
    sipp.sensitivity(model, batches, progress=False)
    gc.collect()
    gc.disable()
    try:
        sipp.sensitivity(model, batches, progress=False)
        assert gc.collect() == 0
    finally:
        gc.enable()


# What a GPU is waited for: values that Python goes by
READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")


def n_reads(n_batches: int, monkeypatch: pytest.MonkeyPatch) -> int:
    reads: list[str] = []

    def counted(name: str, real: Any) -> Any:
        return lambda *given: reads.append(name) or real(*given)

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, counted(name, getattr(Tensor, name)))
        patch.setattr(torch, "equal", counted("equal", torch.equal))
        sipp.sensitivity(network(), list(images(n_batches * BATCH).split(BATCH)))
    return len(reads)


def test_values_are_seldom_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights are looked at for their ranges, which a GPU is not asked for one by one but while it works."""
    first, second = n_reads(1, monkeypatch), n_reads(2, monkeypatch)
    assert second - first == 8  # of a further batch: is it finite, keys, ranges, two kinds of buffers, norms
    assert first == 21  # with the map, the weights and the check of dependence


def test_products_of_a_use_know_their_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in half precision may use TF32 on a GPU, which holds their bits; neither is widened before it is asked."""
    dtypes, exact = list[tuple[torch.dtype, ...]](), numerics.exact_matmul
    monkeypatch.setattr(
        numerics, "exact_matmul", lambda *some: dtypes.append(tuple(t.dtype for t in some)) or exact(*some)
    )
    sipp.sensitivity(nn.Linear(6, 4).to(torch.bfloat16), torch.randn(12, 6).to(torch.bfloat16))
    assert set(dtypes) - {()} == {(torch.bfloat16, torch.bfloat16)}
