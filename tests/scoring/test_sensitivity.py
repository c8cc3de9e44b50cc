"""The definition T1-T3 worked by hand, attention, weights with several uses, and T4's size of S."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import sensitivity as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, OptionError
from sipp.scoring.sensitivities import measure_sensitivities
from sipp.scoring.task import task_of

BOTH = pytest.mark.parametrize("reduce", ["max", "mean"])
F64 = torch.float64


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A float64 module whose every parameter is standard normal, also those that torch starts at 0 or 1."""
    module = make().to(F64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))
    return module


def linear(weight: list[list[float]]) -> nn.Linear:
    """A Linear with the given rows and no bias."""
    rows = torch.tensor(weight)
    module = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
    module.weight = nn.Parameter(rows)
    return module


def agree(got: dict[str, Tensor], expected: dict[str, np.ndarray]) -> None:
    """Fail with words where scores differ from the oracle."""
    assert not oracle.disagreements(got, expected)


# --- By hand ---------------------------------------------------------------------------------------------------------

# Row (1, 3, -2, -2, 0). First patch (4, 2, 1, -3, 5): w+a+ = (4, 6), w-a+ = (2 at the third), w-a- = (6 at the fourth).
# Second patch (-1, 1, 3, 1, 0): w+a+ = (3 at the second), w+a- = (1 at the first), w-a+ = (6, 2).
HAND_WEIGHT = [[1.0, 3.0, -2.0, -2.0, 0.0]]
HAND_PATCHES = [[4.0, 2.0, 1.0, -3.0, 5.0], [-1.0, 1.0, 3.0, 1.0, 0.0]]
HAND_MAX_BOTH = [[1.0, 1.0, 1.0, 1.0, 0.0]]
HAND_MAX_FIRST = [[0.4, 0.6, 1.0, 1.0, 0.0]]
# Mean over the two patches, quadrant by quadrant, then the larger quadrant:
# first: max(++ .4/2, +- 1/2), second: ++ (.6 + 1)/2, third: -+ (1 + .75)/2, fourth: max(-+ .25/2, -- 1/2).
HAND_MEAN_ONE_POINT = [[0.5, 0.8, 0.875, 0.5, 0.0]]


def hand_cases() -> list[tuple[list, str, list]]:
    """(points x patches x K, reduce, scores worked out above)."""
    return [
        ([[HAND_PATCHES[0]]], "max", HAND_MAX_FIRST),
        ([[HAND_PATCHES[0]]], "mean", HAND_MAX_FIRST),
        ([HAND_PATCHES], "max", HAND_MAX_BOTH),
        ([HAND_PATCHES], "mean", HAND_MEAN_ONE_POINT),
        ([[a] for a in HAND_PATCHES], "max", HAND_MAX_BOTH),
        ([[a] for a in HAND_PATCHES], "mean", HAND_MAX_BOTH),  # one patch a point: the mean is over one
    ]


@pytest.mark.parametrize(("points", "reduce", "expected"), hand_cases())
def test_worked_by_hand(points: list, reduce: str, expected: list) -> None:
    reference = np.array(expected)
    as_arrays = [np.array(patches) for patches in points]
    np.testing.assert_allclose(oracle.sensitivity(np.array(HAND_WEIGHT), as_arrays, reduce), reference)
    agree(sipp.sensitivity(linear(HAND_WEIGHT), [torch.tensor(points)], reduce=reduce), {"weight": reference})


def test_the_comparison_finds_wrong_scores() -> None:
    """The comparison used everywhere sees a wrong value, NaN, a wrong shape, a wrong dtype and a missing name."""
    right = {"weight": np.full((2, 3), 0.5)}
    assert not oracle.disagreements({"weight": torch.full((2, 3), 0.5)}, right)
    for wrong in (torch.full((2, 3), 0.5001), torch.full((3, 2), 0.5), torch.full((2, 3), 0.5, dtype=F64)):
        assert oracle.disagreements({"weight": wrong}, right)
    one_nan = torch.full((2, 3), 0.5)
    one_nan[1, 1] = math.nan
    assert oracle.disagreements({"weight": one_nan}, right)
    assert oracle.disagreements({}, right)


def test_zero_over_zero_counts_as_a_patch_in_the_mean() -> None:
    """Three patches, one of them zero and one that meets the row in no quadrant but its own: 0/0 is 0, and counted."""
    scores = sipp.sensitivity(
        linear([[1.0, 1.0]]), [torch.tensor([[[1.0, 1.0], [0.0, 0.0], [3.0, 1.0]]])], reduce="mean"
    )
    agree(scores, {"weight": np.array([[(0.5 + 0.75) / 3, (0.5 + 0.25) / 3]])})


def test_the_model_and_the_scores_are_separate() -> None:
    """Scores carry no gradient and share no memory with the model."""
    model = linear(HAND_WEIGHT)
    scores = sipp.sensitivity(model, [torch.tensor(HAND_PATCHES)])["weight"]
    assert not scores.requires_grad
    scores.zero_()
    assert model.weight.tolist() == HAND_WEIGHT


# --- MultiheadAttention ----------------------------------------------------------------------------------------------

ATTENTION: dict[str, Callable[[], nn.MultiheadAttention]] = {
    "packed": lambda: nn.MultiheadAttention(6, 2, batch_first=True),
    "packed-no-bias-dropout": lambda: nn.MultiheadAttention(6, 3, batch_first=True, bias=False, dropout=0.5),
    "bias-kv-zero-attn": lambda: nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
    "apart": lambda: nn.MultiheadAttention(6, 2, batch_first=True, kdim=5, vdim=4),
    "apart-values": lambda: nn.MultiheadAttention(6, 2, batch_first=True, vdim=3, bias=False),
    "packed-time-first": lambda: nn.MultiheadAttention(6, 2),
    "apart-time-first": lambda: nn.MultiheadAttention(6, 2, kdim=5, vdim=4),
}
N_POINTS, N_QUERIES, N_KEYS, N_HEADS = 3, 4, 5, 2
PADDING = torch.tensor([[0, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
CAUSAL = torch.ones(N_QUERIES, N_KEYS, dtype=torch.bool).triu(1)
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "bool": {"attn_mask": CAUSAL.flip(1)},
    "causal": {"attn_mask": CAUSAL},
    "causal-and-padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    "float-and-padding": {
        "attn_mask": randn(N_QUERIES, N_KEYS, seed=4),
        "key_padding_mask": torch.zeros(PADDING.shape, dtype=F64).masked_fill(PADDING, -math.inf),
    },
    "per-head": {"attn_mask": randn(N_POINTS * N_HEADS, N_QUERIES, N_KEYS, seed=5) > 1.0},
}


class Attends(nn.Module):
    """A model of one attention: inputs are batch first, whatever the attention itself wants.

    `masks` hold for all points; what masks one point comes with it: `hidden_mask` of keys, `head_mask` of each head.
    """

    def __init__(self, attention: nn.MultiheadAttention, need_weights: bool, masks: dict[str, Tensor]) -> None:
        super().__init__()
        self.a, self.need_weights, self.masks = attention, need_weights, masks

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        hidden_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
    ) -> Tensor:
        key, value = query if key is None else key, query if value is None else value
        masks = dict(self.masks)
        if hidden_mask is not None:
            masks["key_padding_mask"] = hidden_mask
        if head_mask is not None:
            masks["attn_mask"] = head_mask.flatten(0, 1)
        if not self.a.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        is_causal = self.masks.get("attn_mask") is CAUSAL  # a hint that torch may use in place of the mask
        out, _ = self.a(query, key, value, need_weights=self.need_weights, is_causal=is_causal, **masks)
        return out if self.a.batch_first else out.transpose(0, 1)


def attention_case(name: str, masks: str) -> tuple[Attends, dict[str, Tensor], dict, oracle.Points]:
    """(model, batch, oracle patches, oracle outputs) of cross attention."""
    attention = seeded(ATTENTION[name])
    widths = (attention.embed_dim, attention.kdim, attention.vdim)
    lengths = (N_QUERIES, N_KEYS, N_KEYS)
    batch = {
        n: randn(N_POINTS, t, w, seed=i) for i, (n, t, w) in enumerate(zip(("query", "key", "value"), lengths, widths))
    }
    points, outputs = oracle.attention_points(attention, *map(oracle.linear_points, batch.values()), **MASKS[masks])
    shared = dict(MASKS[masks])
    if "key_padding_mask" in shared:
        batch["hidden_mask"] = shared.pop("key_padding_mask")
    if masks == "per-head":
        batch["head_mask"] = shared.pop("attn_mask").unflatten(0, (N_POINTS, N_HEADS))
    return (
        Attends(attention, need_weights="bool" not in masks and "causal" not in masks, masks=shared),
        batch,
        points,
        outputs,
    )


@pytest.mark.parametrize(
    ("name", "masks"),
    [(name, "none") for name in ATTENTION]
    + [(name, masks) for name in ("packed", "apart-time-first") for masks in list(MASKS)[1:]]
    + [("bias-kv-zero-attn", "float-and-padding")],
)
def test_attention(name: str, masks: str) -> None:
    model, batch, points, outputs = attention_case(name, masks)
    np.testing.assert_allclose(
        oracle.f64(model.eval()(**batch)), np.stack(outputs), atol=1e-10
    )  # the oracle's own forward
    for reduce in ("max", "mean"):
        expected = oracle.attention_sensitivity(model.a, points, reduce, prefix="a.")
        agree(sipp.sensitivity(model, [batch], reduce=reduce), expected)


@BOTH
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", ["packed", "packed-time-first"])
def test_self_attention(name: str, need_weights: bool, reduce: str) -> None:
    """Query, key and value are one tensor: the call that torch may send down a fused path."""
    model = Attends(seeded(ATTENTION[name]), need_weights, {})
    x = randn(N_POINTS, N_QUERIES, 6)
    points, _ = oracle.attention_points(model.a, *[oracle.linear_points(x)] * 3)
    got = sipp.sensitivity(model, [x[:2], x[2:]], reduce=reduce)
    agree(got, oracle.attention_sensitivity(model.a, points, reduce, prefix="a."))


def encoder_layer_oracle(
    layer: nn.TransformerEncoderLayer, x: Tensor, padding: Tensor | None, reduce: str, prefix: str
) -> tuple[dict[str, np.ndarray], Tensor]:
    """(scores, output) of one encoder layer, written out; padding is a mask of keys and values alone here."""

    def attend(y: Tensor) -> Tensor:
        points, outputs = oracle.attention_points(
            layer.self_attn, *[oracle.linear_points(y)] * 3, key_padding_mask=padding
        )
        scores.update(oracle.attention_sensitivity(layer.self_attn, points, reduce, f"{prefix}self_attn."))
        return torch.from_numpy(np.stack(outputs))

    def feed_forward(y: Tensor) -> Tensor:
        inner = F.relu(layer.linear1(y))
        scores[f"{prefix}linear1.weight"] = oracle.linear_sensitivity(layer.linear1.weight, y, reduce)
        scores[f"{prefix}linear2.weight"] = oracle.linear_sensitivity(layer.linear2.weight, inner, reduce)
        return layer.linear2(inner)

    scores: dict[str, np.ndarray] = {}
    with torch.no_grad():
        if layer.norm_first:
            x = x + attend(layer.norm1(x))
            return scores, x + feed_forward(layer.norm2(x))
        x = layer.norm1(x + attend(x))
        return scores, layer.norm2(x + feed_forward(x))


@BOTH
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(norm_first: bool, reduce: str) -> None:
    layer = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.3, batch_first=True, norm_first=norm_first))
    x = randn(3, 4, 4)
    expected, output = encoder_layer_oracle(layer, x, None, reduce, "")
    torch.testing.assert_close(layer.eval()(x), output)  # the oracle's own forward
    torch.backends.mha.set_fastpath_enabled(True)
    for mode in (True, False):
        agree(sipp.sensitivity(layer.train(mode), [x], reduce=reduce), expected)
        assert torch.backends.mha.get_fastpath_enabled()


def test_transformer_encoder_with_padding() -> None:
    """The encoder's nested-tensor path, which drops padded positions, must not hide or change inputs either."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True), 2)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.e(x, src_key_padding_mask=padding)

    model, x = seeded(Encoder), randn(N_POINTS, N_KEYS, 4)
    padding = torch.arange(N_KEYS) >= torch.tensor([[5], [2], [3]])
    expected, y = {}, x
    for i, layer in enumerate(model.e.layers):
        scores, y = encoder_layer_oracle(layer, y, padding, "max", f"e.layers.{i}.")
        expected |= scores
    agree(sipp.sensitivity(model, [{"x": x, "padding": padding}]), expected)


# --- Weights with several uses ---------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One module called twice, on one vector a point and on several."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(torch.tanh(self.f(x)).mean(1))


class Tied(nn.Module):
    """Two Linear modules with one Parameter, under a later and an earlier name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).mean(1))


@BOTH
@pytest.mark.parametrize(("make", "name"), [(Twice, "f.weight"), (Tied, "first.weight")])
def test_all_uses_of_a_weight_are_one_union(make: Callable[[], nn.Module], name: str, reduce: str) -> None:
    model, x = seeded(make), randn(4, 3, 5)
    first = model.f if make is Twice else model.first
    with torch.no_grad():
        hidden = torch.tanh(first(x)).mean(1)
        points = oracle.union(oracle.linear_points(x), oracle.linear_points(hidden))
    expected = {name: oracle.sensitivity(oracle.f64(first.weight), points, reduce)}
    agree(sipp.sensitivity(model, [x[:3], x[3:]], reduce=reduce), expected)


def test_a_module_reached_by_some_batches_only() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.g(x) if len(x) == 2 else self.f(x)

    model, x = seeded(Sometimes), randn(5, 3)
    expected = {
        "f.weight": oracle.linear_sensitivity(model.f.weight, x[2:], "max"),
        "g.weight": oracle.linear_sensitivity(model.g.weight, x[:2], "max"),
    }
    agree(sipp.sensitivity(model, [x[:2], x[2:]]), expected)
    # two points stand for three, and these do not reach f
    with pytest.raises(DataError, match="which values belong to which input"):
        sipp.sensitivity(model, [x[:2], x[2:]], reduce="mean")


# --- T4 --------------------------------------------------------------------------------------------------------------


def t4(eta: int, rho: int, delta: float) -> int:
    """n = ceil(K_s ln(c eta rho / delta)) with c = 8, K_s = 3."""
    return math.ceil(3 * (math.log(8) + math.log(eta) + math.log(rho) - math.log(delta)))


CNN = lambda: nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10))  # noqa: E731


@pytest.mark.parametrize("delta", [1e-16, 1e-3, 0.5])
@pytest.mark.parametrize(
    ("make", "shape", "eta", "rho"),
    [
        (lambda: nn.Linear(20, 7), (20,), 7, 20),
        (lambda: nn.Linear(20, 7), (3, 20), 21, 20),
        (CNN, (1, 8, 8), 4 * 9 + 10, 36),
        (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 5), 18, 6),
        (lambda: nn.LSTM(3, 5, batch_first=True), (7, 3), 2 * 7 * 20, 5),
        (lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), (5, 4), 5 * (12 + 4 + 6 + 4), 6),
    ],
)
def test_sample_size(make: Callable[[], nn.Module], shape: tuple[int, ...], eta: int, rho: int, delta: float) -> None:
    model = make()
    for n in (1, 3):  # eta is per input, whatever the size of the example
        assert sipp.sample_size(model, torch.zeros(n, *shape), delta=delta) == t4(eta, rho, delta)


def test_sample_size_counts_every_use_and_reads_every_form_of_batch() -> None:
    assert sipp.sample_size(Twice(), torch.ones(2, 3, 5)) == t4((3 + 1) * 5, 5, 1e-16)
    assert sipp.sample_size(Tied(), (torch.ones(2, 3, 5), torch.zeros(2))) == t4((3 + 1) * 5, 5, 1e-16)
    assert sipp.sample_size(Tied(), {"x": torch.ones(2, 3, 5)}, delta=0.1) == t4((3 + 1) * 5, 5, 0.1)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_sample_size_refuses_a_delta_that_is_no_probability(delta: float) -> None:
    with pytest.raises(OptionError, match="delta"):
        sipp.sample_size(nn.Linear(3, 2), torch.zeros(1, 3), delta=delta)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("factor", [2.0**-600, 2.0**600])
def test_float64_inputs_of_any_scale_have_the_same_scores(factor: float, reduce: Literal["max", "mean"]) -> None:
    torch.manual_seed(0)
    layer, points = nn.Linear(6, 4).double(), torch.randn(8, 6).double()
    wanted = sipp.sensitivity(layer, points, reduce=reduce, progress=False)["weight"]
    found = sipp.sensitivity(layer, points * factor, reduce=reduce, progress=False)["weight"]
    assert float(wanted.min()) > 0 and torch.equal(found, wanted)


class WritesToItsInputs(nn.Module):
    """Each layer's input is written to once the layer has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, stride=2), nn.Linear(4, 3)
        self.padded = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.padded):
            y = layer(x)
            x.zero_()
            x = y.relu()
        x = x.mean((2, 3))
        y = self.third(x)
        x.zero_()
        return y


def test_inputs_may_be_written_to_once_a_layer_has_read_them() -> None:
    torch.manual_seed(0)
    model, x = WritesToItsInputs(), torch.randn(5, 3, 7, 7)
    expected = oracle.conv_sensitivity(model.first, oracle.conv_points(model.first, x), "max")
    agree({"first.weight": sipp.sensitivity(model, [x.clone()])["first.weight"]}, {"first.weight": expected})
    model.padded.weight.data.copy_(3e38 * model.padded.weight.data.sign())
    with pytest.raises(DataError, match=r"reach third\.weight are NaN"):
        sipp.sensitivity(model, [x])


def test_rows_whose_scale_is_no_float32_are_scored_like_others() -> None:
    """Weights of 2^-147 are brought near 1 by a factor that float32 does not hold."""
    model, points = nn.Linear(4, 3, bias=False), torch.rand(8, 4)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2, 3, 1], [2, 1, -1, 3], [-3, 1, 2, 2]]))
    expected = sipp.sensitivity(model, [points])["weight"]
    with torch.no_grad():
        model.weight[1:] *= 2.0**-147
    assert torch.equal(sipp.sensitivity(model, [points])["weight"], expected)


def test_points_batches_and_outputs_are_counted() -> None:
    """With the statistics of batches a draw is a batch, and eta counts the outputs of the largest."""
    model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), torch.randn(11, 4)
    found = measure_sensitivities(task_of(model, [x[:8], x[:8], x[8:]], norm_stats="batch"))
    assert (found.n_points, found.n_distinct, found.n_outputs) == (19, 2, 8 * (3 + 2))
    found = measure_sensitivities(task_of(model, [x[:8], x[:8], x[8:]]))
    assert (found.n_points, found.n_distinct, found.n_outputs) == (19, 11, 3 + 2)


class Mixes(nn.Module):
    """A layer meets neighbouring points together, so that its values belong to no single one."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs, self.own = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + self.pairs(x[1:] * x[:-1]).mean()


def test_there_are_no_means_where_values_belong_to_no_single_point() -> None:
    task = task_of(Mixes(), [torch.randn(5, 3), torch.randn(5, 3)])
    found = measure_sensitivities(task, with_means=True)
    assert all(layer.mean_FK is None for layer in found.layers)
    assert [layer.sign_complexity is None for layer in found.layers] == [True, False]
