"""Attention with grouped heads gives the same numbers with its keys and values repeated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sipp.inputs import grouped_attention as restore
from sipp.inputs.capture import scoring_mode


class Grouped(nn.Module):
    """Six query heads that share two heads of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.num_key_value_groups = 3  # as in transformers
        self.queries, self.keys, self.values = nn.Linear(12, 24), nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.queries, self.keys, self.values))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Calls(TorchFunctionMode):
    """Notes the options of every attention that reaches torch."""

    def __init__(self) -> None:
        super().__init__()
        self.options: list[dict] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.options.append({"n_keys": args[1].shape[1], **(kwargs or {})})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_heads_are_repeated_where_no_fused_kernel_takes_groups(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "DEVICES", ("cpu",))
    torch.manual_seed(0)
    model, x = Grouped().to(dtype).eval(), torch.randn(3, 5, 12, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
    with Calls() as calls, scoring_mode(model, "running"):
        found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    is_slow = dtype == torch.float32
    assert calls.options == [{"n_keys": 6 if is_slow else 2, "is_causal": True, "enable_gqa": not is_slow}]


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_other_models_run_as_they_are(is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Grouped().eval(), torch.randn(3, 5, 12)
    if is_on_gpu:
        monkeypatch.setattr(restore, "DEVICES", ("cpu",))
        model.num_key_value_groups = 1  # it does not say that its heads are grouped
    with Calls() as calls, scoring_mode(model, "running"):
        model(x)
    assert calls.options[0]["enable_gqa"]
