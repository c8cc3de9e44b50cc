"""What a point is: how many there are, which two are the same, which positions count, and what is no data at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import sipp
from sipp.errors import DataError, ModelError
from sipp.inputs import data as reading
from sipp.inputs.data import Batch, data_of
from sipp.inputs.outputs import CHANCE, NEIGHBOURS, ORDER, allowed_difference, why_dependent
from sipp.verbs.certify import certify, certify_accuracy

pytestmark = pytest.mark.filterwarnings("ignore::sipp.errors.DeadRowsWarning")


def points(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def halved(model: nn.Module) -> nn.Module:
    """A copy with half of its weights; rows may die."""
    return sipp.prune(model, None, keep=0.5, method="magnitude").model


def first(data: Any, **options: Any) -> Batch:
    return next(data_of(data, **options).batches())


# ---- how many points there are


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, torch.tensor(1)), lambda x: {"input": x}])
def test_a_list_of_single_vectors_is_refused_with_the_way_out(wrap: Callable[[Tensor], object]) -> None:
    vectors = [wrap(vector) for vector in points(20, 8)]
    for call in (
        lambda: sipp.prune(mlp(), vectors, keep=0.5),
        lambda: sipp.sensitivity(mlp(), vectors),
        lambda: certify(mlp(), mlp(), vectors),
    ):
        with pytest.raises(DataError, match=r"a single vector of 8 numbers.*torch\.stack"):
            call()


def test_one_dimension_is_enough_for_whole_numbers_and_beside_a_larger_input() -> None:
    assert first([torch.arange(5)]).n_points == 5
    assert first([{"x": points(5, 8), "t": points(5)}]).n_points == 5


class Sequences(nn.Module):
    """The outputs of an LSTM at every step; batch_first says which dimension holds the sequences."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(8, 5, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


# ---- whether an output is a function of its point


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1, training=True)


class Backwards(Sequences):
    """An LSTM that reads from the last step to the first: the last steps do not depend on the others."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(0)).flip(0)


class OtherKernel(nn.Module):
    """Rounds otherwise for another number of points, as kernels do."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x if len(x) == 64 else x * self.factor


class Attention(nn.Module):
    """Self-attention over dimension 0 (batch_first=False) or 1."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


DEPENDENT: dict[str, tuple[nn.Module, Tensor, str]] = {
    "batch mean": (Centred(), points(9, 8), NEIGHBOURS),
    "noise": (Noise(), points(9, 8), CHANCE),
    "noise, one point": (Noise(), points(1, 80), CHANCE),
    "time first": (Sequences(False), points(9, 3, 8), ORDER),
    "time first, two steps": (Sequences(False), points(2, 3, 8), ORDER),
    "time first, backwards": (Backwards(False), points(9, 3, 8), ORDER),
    "more than rounding": (OtherKernel(1.01), points(64, 8), NEIGHBOURS),
    "attention over points": (Attention(False), points(9, 3, 8), NEIGHBOURS),
}
FUNCTIONS: dict[str, tuple[nn.Module, Tensor]] = {
    "mlp": (mlp(), points(9, 8)),
    "one point": (mlp(), points(1, 8)),
    "bfloat16": (mlp().bfloat16(), points(64, 8, dtype=torch.bfloat16)),
    "float16": (mlp().half(), points(64, 8, dtype=torch.float16)),
    "bfloat16, another kernel": (OtherKernel(1.01), points(64, 8, dtype=torch.bfloat16)),
    "float32, another kernel": (OtherKernel(1 + 1e-5), points(64, 8)),
    "running statistics": (nn.BatchNorm1d(8), points(9, 8)),
    "sequences": (Sequences(True), points(9, 3, 8)),
    "attention": (Attention(True), points(9, 3, 8)),
    "zeros": (nn.ReLU(), -points(9, 8).abs()),
    "tiny": (nn.Identity(), points(9, 8) * 1e-30),
}


def reason_of(model: nn.Module, x: Tensor) -> str:
    with torch.no_grad():
        batch = first([x], refuses_non_finite=False)
        return why_dependent(batch, lambda batch: model.eval()(*batch.args), allowed_difference(model, batch))


@pytest.mark.parametrize("case", DEPENDENT)
def test_what_depends_on_more_than_its_point_is_found(case: str) -> None:
    model, x, reason = DEPENDENT[case]
    assert reason_of(model, x) == reason
    if len(x) > 1:
        with pytest.raises(ModelError, match="inputs would not be independent"):
            certify(model, model, [x])
        with pytest.raises(ModelError, match=r"pruned, holdout batch 0"):
            certify(Flat() if "time" in case else nn.Identity(), model, [x])


class Flat(nn.Module):
    """A function of the point with the shape of an LSTM's output."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :5]


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_function_of_the_point_passes(case: str) -> None:
    assert reason_of(*FUNCTIONS[case]) == ""


def test_values_that_are_not_finite_are_compared_too() -> None:
    x = points(9, 8)
    x[7, 2], x[8, 1] = float("nan"), float("inf")
    assert reason_of(nn.Identity(), x) == ""
    assert reason_of(Centred(), x) != ""


ALLOWED = 1e-5


def test_outputs_may_be_nested_and_a_row_for_each_point_is_needed() -> None:
    batch, model = first([points(9, 3, 8)]), nn.LSTM(8, 5, batch_first=True)
    assert (
        why_dependent(batch, lambda part: model(*part.args), ALLOWED) == ""
    )  # the states have layers first: not compared
    two = first([points(2, 3, 8)])
    assert (
        why_dependent(two, lambda part: nn.LSTM(8, 5, 2, batch_first=True)(*part.args), ALLOWED) == CHANCE
    )  # new weights
    assert "one row for each of the 9 inputs" in why_dependent(batch, lambda part: part.args[0].mean(), ALLOWED)
    assert "by themselves (no)" in why_dependent(batch, lambda part: fails_on_part(part, 9), ALLOWED)


def fails_on_part(batch: Batch, n: int) -> Tensor:
    if batch.n_points != n:
        raise RuntimeError("no")
    return batch.args[0]


# ---- labels in a dict


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is None
        return self.net(x)


@pytest.mark.parametrize("name", ["labels", "label"])
def test_labels_in_a_dict_are_labels(name: str) -> None:
    x, y = points(100, 8), torch.arange(100) % 4
    model, named, plain = Keywords(), [{"x": x, name: y}], [(x, y)]
    scores = sipp.prune(model, named, keep=0.5, method="snip").masks
    expected = sipp.prune(model.net, plain, keep=0.5, method="snip").masks
    assert all(torch.equal(scores[f"net.{name}"], mask) for name, mask in expected.items())
    cert = certify_accuracy(model, halved(model), named)
    again = certify_accuracy(model.net, halved(model.net), plain)
    assert (cert.mode, cert.n_lost, cert.data_hash) == ("labels", again.n_lost, again.data_hash)


def test_in_a_pair_the_whole_dict_goes_to_the_model() -> None:
    batch = first([({"x": points(5, 8), "labels": torch.arange(5)}, None)])
    assert set(batch.kwargs) == {"x", "labels"} and batch.labels is None

    class Conditional(nn.Module):
        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return x * label[:, None]

    data = {"x": points(60, 8), "label": torch.arange(60)}
    with pytest.raises(DataError, match=r"missing .*'label'.*give the pair \(dict, labels\)"):
        certify(Conditional(), Conditional(), [data])
    assert certify(Conditional(), Conditional(), [(data, None)]).n == 60


# ---- padding


def padded(lengths: list[int], to: int, seed: int = 0) -> dict[str, Tensor]:
    """Sentences of these lengths, the same whatever they are padded to (with a token that means something)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), to), 7)
    for row, length in zip(ids, lengths):
        row[:length] = torch.randint(0, 50, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(to) < torch.tensor(lengths)[:, None]).long()}


def test_padding_is_read_from_masks() -> None:
    batch = padded([2, 4, 1], 5)
    real = batch["attention_mask"].bool()
    assert torch.equal(first([batch]).real_BT, real)
    assert torch.equal(first([batch], n_points=2).real_BT, real[:2])
    assert first([batch], device=torch.device("meta")).real_BT.device.type == "meta"
    ids = batch["input_ids"]
    for name in ("key_padding_mask", "src_key_padding_mask", "padding_mask"):
        assert torch.equal(first([{"x": ids, name: ~real}]).real_BT, real)
    assert torch.equal(first([batch]).at(torch.tensor([2, 0])).real_BT, real[[2, 0]])
    unclear = (
        {"x": ids},
        {"x": ids, "attention_mask": torch.zeros(3, 5).masked_fill(~real, float("-inf"))},  # added to scores
        {"x": ids, "attention_mask": real[:, None].expand(3, 5, 5)},
        {"x": ids, "attention_mask": real, "key_padding_mask": real},  # they disagree
        {"src": ids, "tgt": ids, "src_key_padding_mask": ~real},  # whose positions?
    )
    assert all(first([batch]).real_BT is None for batch in unclear)
    with pytest.raises(DataError, match=r"batch 0: all positions of input 1 are padding"):
        first([padded([2, 0, 1], 5)])


# ---- copies


# ---- endless data


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield from points(7, 8).clone()


ENDLESS: dict[str, Callable[[], Any]] = {
    "cycle": lambda: itertools.cycle([points(32, 8)]),
    "generator of new tensors": lambda: (points(4, 8, seed=i % 3) for i in itertools.count()),
    "loader": lambda: DataLoader(Endless(), batch_size=4),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_endless_data_is_refused_and_n_points_bounds_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_UNCOUNTED", 200)
    with pytest.raises(DataError, match=r"calibration does not seem to end: .*give finite data"):
        sipp.prune(mlp(), ENDLESS[case](), keep=0.5, method="sipp-det")
    assert sum(batch.n_points for batch in data_of(ENDLESS[case](), n_points=100).batches()) == 100


# ---- data of wrong kinds

X = points(60, 8)
WRONG: dict[str, tuple[Any, str]] = {
    "int64": ([(1000 * X).long()], r"batch 0 \(input 0: int64 60 x 8\).*parameters are float32: convert"),
    "half": ([X.half()], r"batch 0 \(input 0: float16 60 x 8\).*parameters are float32: convert"),
    "double": (X.double(), r"batch 0 \(input 0: float64 60 x 8\).*parameters are float32: convert"),
    "complex": ([X.to(torch.complex64)], r"batch 0, input 0 contains complex numbers.*view_as_real"),
    "sparse": ([X.to_sparse()], r"batch 0, input 0 is a sparse.*to_dense"),
    "one sparse tensor": (X.to_sparse(), r"is a sparse.*to_dense"),
    "meta": ([X.to("meta")], r"batch 0, input 0 is on the meta device"),
    "one meta tensor": (X.to("meta"), r"is on the meta device"),
    "numpy": (X.numpy(), r"is a ndarray.*torch\.from_numpy"),
    "numpy batches": ([X.numpy()], r"batch 0, input 0 contains a ndarray.*torch\.from_numpy"),
    "second batch": ([X, X.numpy()], r"batch 1, input 0 contains a ndarray"),
    "numpy in a dict": ([{"input": np.zeros((5, 8))}], r"batch 0, input contains a ndarray"),
    "text": (["text"], r"batch 0, input 0 contains a str"),
    "bytes": (b"text", r"is a bytes"),
    "none": ([None], r"batch 0, input 0 contains a NoneType"),
    "no data": (None, r"is a NoneType"),
    "nested lists": ([[[1.0] * 8] * 2], r"batch 0, input 0 contains a float"),
    "width": ([points(60, 9)], r"batch 0 \(input 0: float32 60 x 9\).*of the shape and type"),
    "unknown keyword": ([{"nothing": X}], r"batch 0 \(nothing: float32 60 x 8\).*unexpected keyword"),
}


@pytest.mark.parametrize("case", WRONG)
def test_data_of_a_wrong_kind_is_named_with_the_way_out(case: str) -> None:
    data, words = WRONG[case]
    with pytest.raises((DataError, ModelError), match="holdout " + words if "batch" in words else words):
        certify(mlp(), mlp(), data)
    with pytest.raises((DataError, ModelError), match=words):
        sipp.prune_to(mlp(), points(20, 8, seed=1), data, epsilon=0.5, method="magnitude")


def test_interrupts_and_memory_errors_of_a_network_stay_what_they_are() -> None:
    class Raises(nn.Module):
        def __init__(self, error: BaseException) -> None:
            super().__init__()
            self.error = error

        def forward(self, x: Tensor) -> Tensor:
            raise self.error

    no_room = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    for error in (KeyboardInterrupt(), MemoryError(), torch.OutOfMemoryError("full"), no_room):
        with pytest.raises(type(error)) as caught:
            certify(Raises(error), Raises(error), X)
        assert caught.value is error
    with pytest.raises(DataError, match=r"holdout batch 0 \(input 0: float32 60 x 8\).*ValueError: odd") as wrapped:
        certify(Raises(ValueError("odd")), mlp(), X)
    assert isinstance(wrapped.value.__cause__, ValueError)
