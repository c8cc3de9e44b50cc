"""Patterns n:m: exactly the n largest of every m, for any score, with bounds and repair; what breaks one is named."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from oracles import patterns as oracle
from torch import nn

import sipp
from sipp.errors import DataError, OptionError
from sipp.pruning.rows import largest_in_groups
from sipp.results.options import Pattern
from sipp.scoring.methods import METHODS, MethodInfo

FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3e-20, 2e18, 7.0])  # ties, zeros, negative ones
SHAPES = st.tuples(st.integers(0, 4), st.integers(0, 13))


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Pattern]:
    n_rows, fan_in = draw(SHAPES)
    values = draw(st.lists(FEW, min_size=n_rows * fan_in, max_size=n_rows * fan_in))
    m = draw(st.integers(1, 9))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return torch.tensor(values, dtype=dtype).reshape(n_rows, fan_in), Pattern(draw(st.integers(1, m)), m)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_masks_are_their_definition(case: tuple[torch.Tensor, Pattern]) -> None:
    score_FK, pattern = case
    mask_FK = largest_in_groups(score_FK, pattern)
    assert mask_FK.tolist() == oracle.largest_in_groups(score_FK.tolist(), pattern.n, pattern.m)
    assert mask_FK.shape == score_FK.shape and mask_FK.dtype == torch.bool
    assert int(mask_FK.sum()) == len(score_FK) * pattern.kept(score_FK.shape[1])


def obeyed(tensors: dict[str, torch.Tensor], n: int, m: int) -> bool:
    return all(oracle.obeys(tensor.flatten(1).tolist(), n, m) for tensor in tensors.values())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)  # fan-in 27, 36
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)).eval()


def points() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(40, 3, 4, 4, generator=generator), torch.arange(40) % 5) for _ in range(3)]


@pytest.mark.parametrize(
    "row", [row for row in METHODS if not row.is_sampled and not row.fitting], ids=lambda row: row.name
)
def test_every_score_that_ranks(row: MethodInfo) -> None:
    model = net()
    pruned = sipp.prune(model, points(), pattern="2:4", method=row.name)
    assert obeyed(pruned.masks, 2, 4)
    counts = {layer.name: layer.kept for layer in pruned.layers}
    assert counts == {"0.weight": 8 * 14, "2.weight": 8 * 18, "5.weight": 5 * 64}
    assert pruned.kept == pruned.budget == sum(counts.values()) and pruned.pattern == "2:4"
    for name, mask in pruned.masks.items():
        expected = torch.where(mask, model.get_parameter(name), 0.0)
        assert torch.equal(pruned.model.get_parameter(name), expected)
    assert all(layer.eps is not None for layer in pruned.layers)  # T5, T17: of any mask
    assert "2:4" in str(pruned)


def test_repair_keeps_the_pattern() -> None:
    generator = torch.Generator().manual_seed(1)  # more points than weights of a row, many times
    model, data = net(), [torch.rand(40, 3, 4, 4, generator=generator) for _ in range(9)]
    plain = sipp.prune(model, data, pattern="2:4", method="sipp-det")
    fixed = sipp.repair(model, plain, data)
    searched = sipp.prune(model, data, pattern="2:4", method="sipp-det", repair=True)
    assert all(torch.equal(mask, plain.masks[name]) for name, mask in fixed.masks.items())
    for found in (fixed, searched):
        assert found.repair is not None and found.pattern == "2:4"
        assert obeyed({name: found.model.get_parameter(name) for name in found.masks}, 2, 4)
    x = torch.cat(data)
    errors = [float((found.model(x) - model(x)).norm().detach()) for found in (plain, fixed, searched)]
    assert errors[2] < errors[1] < errors[0]


def test_recurrent_layers_and_rows_that_lie_in_columns() -> None:
    torch.manual_seed(0)
    pruned = sipp.prune(nn.LSTM(6, 5), None, pattern="1:3", method="magnitude")
    assert len(pruned.masks) == 2 and obeyed(pruned.masks, 1, 3)
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes))
    pruned = sipp.prune(gpt2, None, pattern="2:4", method="magnitude")
    assert obeyed({name: mask.t() for name, mask in pruned.masks.items()}, 2, 4)  # inputs x outputs
    assert pruned.keep == 0.5


@pytest.mark.parametrize(
    "text",
    ["", "2", "2:", ":4", "0:4", "5:4", "2:4:8", " 2:4", "2:4\n", "-1:4", "1:9999999", "2.0:4", 2, 0.5, b"2:4", [2]],
)
def test_what_is_no_pattern(text: object) -> None:
    with pytest.raises(OptionError, match="is not a pattern n:m"):
        Pattern.of(text)


def test_what_does_not_go_together() -> None:
    for more in ({"keep": 0.5}, {"budget": 10}, {"keep": 0.5, "budget": 10}):
        with pytest.raises(OptionError, match="give exactly one of keep"):
            sipp.prune(net(), None, pattern="2:4", method="magnitude", **more)  # type: ignore[arg-type]
    for method in ("sipp-rand", "sipp-hybrid"):
        with pytest.raises(OptionError, match="draws weights"):
            sipp.prune(net(), points(), pattern="2:4", method=method)
    with pytest.raises(OptionError, match="is not a pattern"):
        sipp.prune(net(), None, pattern=24, method="magnitude")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="NaN"):
        largest_in_groups(torch.tensor([[1.0, torch.nan]]), Pattern(1, 2))
