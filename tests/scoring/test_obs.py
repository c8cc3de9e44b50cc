"""OBS: the least error of its definition, whatever the batches and layers; the same share of every layer."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracles import scores as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.pruning.rows import even_layers
from sipp.scoring import obs as file
from sipp.scoring.obs import DAMPING, obs
from sipp.scoring.task import task_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12 * float(expected.max()))


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 700])
def test_scores_equal_the_least_squares_error_for_any_batches(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "CHUNK_BYTES", chunk_bytes)
    model, x = nn.Sequential(nn.Linear(5, 4)), drawn(12, 3, 5)
    x[..., 1] = x[..., 0] + 0.1 * x[..., 1]  # one that another can make up for
    x[..., 3] = 0.0
    with torch.no_grad():
        model[0].weight[1, 2] = 0.0
    expected = oracle.obs(model[0].weight.detach(), x.reshape(-1, 5), DAMPING)
    for data in (x, [x[:5], x[5:]]):
        found = obs(task_of(model, data))["0.weight"]
        close(found, expected)
        assert float(found[1, 2]) == 0.0


def test_each_group_of_a_convolution_has_its_own_inputs() -> None:
    conv, x = nn.Conv2d(4, 6, 2, stride=2, padding=1, groups=2), drawn(5, 4, 5, 5)
    patches = nn.functional.unfold(x.double(), 2, stride=2, padding=1).movedim(1, 2).reshape(-1, 2, 8)
    rows = conv.weight.detach().view(6, 8)
    halves = [oracle.obs(rows[3 * g : 3 * g + 3], patches[:, g], DAMPING) for g in (0, 1)]
    close(obs(task_of(nn.Sequential(conv), x))["0.weight"], torch.cat(halves).view(6, 2, 2, 2))


def test_recurrent_weights_meet_the_steps() -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(3, 4, batch_first=True), drawn(6, 5, 3)
    after = lstm(x)[0].detach()
    before = torch.cat([torch.zeros(6, 1, 4), after[:, :-1]], 1)
    scores = obs(task_of(lstm, x))
    close(scores["weight_ih_l0"], oracle.obs(lstm.weight_ih_l0.detach(), x.reshape(-1, 3), DAMPING))
    expected = oracle.obs(lstm.weight_hh_l0.detach(), before.reshape(-1, 4), DAMPING)
    torch.testing.assert_close(scores["weight_hh_l0"], expected, rtol=1e-4, atol=1e-6)  # h_t is float32 in both


def test_blocks_of_a_projection_meet_their_own_inputs() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.mix(x, y, y)[0]

    model, x, y = Cross(), drawn(6, 3, 4), drawn(6, 5, 4, seed=1)
    found = obs(task_of(model, [((x, y), None)]))["mix.in_proj_weight"]
    rows = model.mix.in_proj_weight.detach()
    close(found[:4], oracle.obs(rows[:4], x.reshape(-1, 4), DAMPING))
    close(found[4:], oracle.obs(rows[4:], y.reshape(-1, 4), DAMPING))


def test_inputs_that_are_zero_score_zero_and_others_that_are_nothing_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    assert not bool(obs(task_of(model, torch.zeros(4, 3)))["0.weight"].any())
    with pytest.raises(DataError, match="NaN"):
        obs(task_of(model, torch.full((4, 3), float("nan"))))
    with pytest.raises(ModelError, match=r"0\.weight.*overflow"):
        obs(task_of(model.double(), torch.full((4, 3), 1e200, dtype=torch.float64)))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("floor", [0, 0.001])
def test_the_same_share_of_every_layer(floor: float) -> None:
    pruned = sipp.prune(net(), drawn(40, 12), keep=0.5, method="obs", floor=floor)
    assert pruned.kept == pruned.budget
    scores = obs(task_of(net(), drawn(40, 12)))
    for layer in pruned.layers:
        assert abs(layer.kept - 0.5 * layer.n_weights) < (1 if floor == 0 else 3)
        score, mask = scores[layer.name], pruned.masks[layer.name]
        if floor == 0:
            assert float(score[mask].min()) >= float(score[~mask].max())
        else:
            assert bool((mask.any(1)).all())


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_even_layers_add_up_and_are_even(shapes: list[tuple[int, int]], share: float) -> None:
    sizes = [n_rows * fan_in for n_rows, fan_in in shapes]
    budget = round(share * sum(sizes))
    kept, above = even_layers(shapes, budget), even_layers(shapes, budget, least=1)
    assert sum(kept) == sum(above) == budget
    assert all(0 <= n <= size for n, size in zip(kept, sizes))
    pairs = list(zip(kept, sizes))  # the nearest whole numbers at one share
    assert max((n - 0.5) / size for n, size in pairs) <= min((n + 0.5) / size for n, size in pairs) + 1e-12
    if budget >= sum(n_rows for n_rows, _ in shapes):
        assert all(n >= n_rows for n, (n_rows, _) in zip(above, shapes))
