"""Patches of a mixture of experts whose weights lie in one tensor: each expert reads the tokens that are sent to it.

As transformers has them: `gate_up_proj` (experts x 2 I x H) and `down_proj` (experts x H x I), called with the tokens,
the experts of each (tokens x k) and their shares. The rows of a weight are those of all experts in turn.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs.layers.registry import DOWN, UP, Adapter
from sipp.inputs.patches import WeightUse


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    return UP, DOWN


def expert_uses(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int
) -> Generator[WeightUse, None, Tensor]:
    """Two uses per expert, of the rows that read the tokens and of those that read its hidden activations.

    The output is the sum of the chosen experts' outputs, times their shares.
    """
    hidden_NH, chosen_Nk, shares_Nk = _routed(args, kwargs)
    up, down = module.get_parameter(UP).detach(), module.get_parameter(DOWN).detach()
    total_NH = hidden_NH.new_zeros(hidden_NH.shape)
    for expert in range(len(up)):
        at = (chosen_Nk == expert).any(-1).nonzero().flatten()
        tokens_PH = hidden_NH[at]
        gate_PI, value_PI = F.linear(tokens_PH, up[expert]).chunk(2, dim=-1)
        inner_PI = module.act_fn(gate_PI) * value_PI
        for name, patches_PK, n_rows in ((UP, tokens_PH, up.shape[1]), (DOWN, inner_PI, down.shape[1])):
            yield WeightUse(name, patches_PK[None, None], 1, row_start=expert * n_rows, n_rows=n_rows, attributed=False)
        share_P = (shares_Nk[at] * (chosen_Nk[at] == expert)).sum(-1)
        total_NH.index_add_(0, at, (F.linear(inner_PI, down[expert]) * share_P[:, None]).to(total_NH.dtype))
    return total_NH


def _routed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, their experts and the shares of these."""
    given = (*args, *kwargs.values())
    is_known = len(given) == 3 and all(isinstance(value, Tensor) and value.ndim == 2 for value in given)
    if not is_known or given[1].is_floating_point() or given[1].shape != given[2].shape:
        raise ModelError("is not called with tokens, the experts of each and their shares")
    return given[0], given[1], given[2]


EXPERTS: Adapter = Adapter(expert_weights, expert_uses, row_dims=2)
