"""Inputs of another width, channel count, rank, layout or dtype than a layer takes: our own errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fresh_process import run_script
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import sipp
from sipp.errors import DataError, ModelError
from sipp.inputs.data import Batch
from sipp.inputs.layers import find_prunable_layers
from sipp.inputs.patches import WeightUse, has_patches

N_CASES = 100


def test_random_mismatches_end_in_our_own_errors() -> None:
    """In a process of its own, for what is looked for is a crash; the script itself runs many more."""
    script = Path(__file__).parent / "mismatches.py"
    done = run_script(script, 0, N_CASES)
    results = [line for line in done.stdout.splitlines() if line.startswith("result|")]
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-3000:]}{done.stderr[-2000:]}"
    outcomes = {line.split("|")[4] for line in results}
    assert len(results) == N_CASES and outcomes == {"success", "DataError", "ModelError"}  # all of them are met


class Calls(nn.Module):
    """One layer, called by `call`."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> object:
        return self.call(self.layer, x)


def state(*shape: int) -> Tensor:
    return torch.zeros(shape)


def a_packed(m: nn.Module, x: Tensor) -> object:
    return m(pack_padded_sequence(x, torch.full((len(x),), 2), batch_first=True))


MISFITS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "features": (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (9,), r"0 \(Linear\) takes 8 features"),
    "channels": (nn.Sequential(nn.Conv2d(3, 4, 3)), (4, 8, 8), r"0 \(Conv2d\) takes 3 channels in dimension 1, not 4"),
    "NHWC": (nn.Sequential(nn.Conv2d(3, 4, 3)), (8, 8, 3), "takes 3 channels in dimension 1, not 8"),
    "1-d": (nn.Conv1d(3, 4, 3), (5, 8), r"the model itself \(Conv1d\) takes 3 channels"),
    "grouped": (nn.Conv2d(4, 4, 3, groups=2), (2, 8, 8), "takes 4 channels in dimension 1, not 2"),
    "rank": (nn.Conv2d(3, 4, 3), (1, 3, 8, 8), "takes inputs of 4 dimensions"),
    "kernel": (nn.Conv2d(3, 4, 5, dilation=2), (3, 8, 8), "has a kernel of 9 x 9, larger than its padded input"),
    "lstm": (nn.LSTM(8, 4, batch_first=True), (5, 7), "takes sequences of 8 features, not 3 x 5 x 7"),
    "lstm rank": (nn.LSTM(8, 4, batch_first=True), (5, 5, 8), "takes sequences of 8 features"),
    "packed": (Calls(nn.GRU(8, 4, batch_first=True), a_packed), (5, 7), "takes sequences of 8 features"),
    "state": (
        Calls(nn.LSTM(8, 4, batch_first=True), lambda m, x: m(x, (state(1, 2, 4), state(1, 3, 4)))),
        (5, 8),
        "takes states of 1 x 3 x 4 and 1 x 3 x 4",
    ),
    "cell state of a projection": (
        Calls(nn.LSTM(8, 4, proj_size=2, batch_first=True), lambda m, x: m(x, (state(1, 3, 2), state(1, 3, 2)))),
        (5, 8),
        "takes states of 1 x 3 x 2 and 1 x 3 x 4",
    ),
    "no pair": (Calls(nn.LSTM(8, 4, batch_first=True), lambda m, x: m(x, state(1, 3, 4))), (5, 8), "takes states of"),
    "cell": (nn.GRUCell(8, 4), (7,), "takes 8 features, not 7"),
    "state of a cell": (Calls(nn.RNNCell(8, 4), lambda m, x: m(x, state(2, 4))), (8,), "takes states of 3 x 4"),
    "attention": (
        Calls(nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)[0]),
        (5, 6),
        "takes 8 features, not 6",
    ),
    "key": (
        Calls(nn.MultiheadAttention(8, 2, kdim=6, batch_first=True), lambda m, x: m(x, x, x)[0]),
        (5, 8),
        "takes 6 features, not 8",
    ),
    "padding mask": (
        Calls(nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x, key_padding_mask=state(5, 3) > 0)),
        (5, 8),
        "key_padded",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_misfit_is_named(case: str) -> None:
    model, shape, words = MISFITS[case]
    for prune in (sipp.sensitivity, sipp.sample_size, lambda m, x: sipp.prune(m, x, keep=0.5)):
        with pytest.raises(DataError, match=rf"batch 0.*{words}"):
            prune(model, torch.rand(3, *shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_no_real_number_is_named(dtype: torch.dtype) -> None:
    with pytest.raises(DataError, match=str(dtype).removeprefix("torch.")):
        sipp.sensitivity(nn.Linear(4, 3), [torch.ones(3, 4, dtype=dtype)])


def test_an_error_of_the_model_names_the_batch_and_its_inputs() -> None:
    model = Calls(nn.Linear(4, 3), lambda m, x: m(x)[:, [7]])
    for function in (sipp.sensitivity, lambda m, x: sipp.certify(m, m, x)):
        with pytest.raises(DataError, match=r"batch 1 \(input 0: float32 3 x 4\).*IndexError: index 7") as caught:
            function(model, [torch.rand(0, 4), torch.rand(3, 4)])
        assert isinstance(caught.value.__cause__, IndexError)
    labels = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(DataError, match="IndexError: index 7"):
        sipp.prune(model, [(torch.rand(3, 4), labels)], keep=0.5, method="snip")


# --- The one place where uses are checked, for adapters that check nothing --------------------------------------------

GOOD = WeightUse("weight", torch.rand(3, 2, 5, 4), n_position_dims=1)
BAD: dict[str, WeightUse] = {
    "fan-in": replace(GOOD, windows=torch.rand(3, 2, 5, 3)),
    "too few dimensions": replace(GOOD, windows=torch.rand(3, 2), n_position_dims=1),
    "more positions than there are": replace(GOOD, n_position_dims=3),
    "negative positions": replace(GOOD, n_position_dims=-1),
    "groups": replace(GOOD, windows=torch.rand(3, 4, 5, 4)),
    "first row": replace(GOOD, row_start=-2),
    "last row": replace(GOOD, row_start=2, n_rows=6),
    "no rows": replace(GOOD, n_rows=0),
    "points": replace(GOOD, windows=torch.rand(4, 2, 5, 4)),
    "points of all": replace(GOOD, attributed=False),
    "counts": replace(GOOD, counts_B=torch.tensor([5, 4, 1])),
    "padding of others": replace(GOOD, real_BP=torch.ones(3, 4, dtype=torch.bool)),
    "padding that is no truth": replace(GOOD, real_BP=torch.ones(3, 5)),
    "dtype": replace(GOOD, windows=torch.ones(3, 2, 5, 4, dtype=torch.int32)),
    "device": replace(GOOD, windows=torch.rand(3, 2, 5, 4, device="meta")),
    "sparse": replace(GOOD, windows=torch.rand(3, 2, 5, 4).to_sparse()),
}


def a_weight_of_6_rows_and_4_columns() -> Iterator[object]:
    for layer in find_prunable_layers(nn.Linear(4, 6)):
        yield from layer.weights.values()


@pytest.mark.parametrize("case", BAD)
def test_a_use_that_is_not_of_its_weight_is_refused(case: str) -> None:
    (weight,) = a_weight_of_6_rows_and_4_columns()
    batch = Batch(0, "batch 0", (torch.rand(3, 4),), {}, None, 3)
    assert has_patches(GOOD, weight, torch.device("cpu"), batch)
    with pytest.raises((DataError, ModelError), match=r"^(takes|has an adapter|is on)"):
        has_patches(BAD[case], weight, torch.device("cpu"), batch)
