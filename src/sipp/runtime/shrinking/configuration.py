"""Writes new widths into the configuration of a Hugging Face model, so that `from_pretrained` builds the small one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sipp.errors import warn_caller
from sipp.results import ChannelsLeft

WIDTHS = ("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim")  # of MLPs
HEADS, KEY_HEADS = "num_attention_heads", "num_key_value_heads"


def match_configuration(model: nn.Module, sites: Sequence[ChannelsLeft]) -> None:
    """Sets the widths in `model.config`, if it has one; warns if it cannot describe the model then."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict") and not _is_matched(config, model, sites):
        warn_caller(
            "the configuration cannot describe the smaller network, so from_pretrained would not load it: "
            "use uniform=True, and remove as many heads as leave a divisor of the hidden size"
        )


def _is_matched(config: Any, model: nn.Module, sites: Sequence[ChannelsLeft]) -> bool:
    """Sets the widths of a configuration if it describes the model then."""
    after: dict[int, set[int]] = {}
    for site in sites:
        after.setdefault(site.before, set()).add(site.after)
    if any(len(widths) > 1 for widths in after.values()):
        return False
    to = {before: min(widths) for before, widths in after.items()}
    new = {name: to[width] for name in WIDTHS if (width := getattr(config, name, None)) in to}
    n_heads = getattr(config, HEADS, None)
    n_key_heads = getattr(config, KEY_HEADS, None) or n_heads
    if n_heads and n_key_heads in to:
        new |= {HEADS: n_heads // n_key_heads * to[n_key_heads]}
        if getattr(config, KEY_HEADS, None):
            new[KEY_HEADS] = to[n_key_heads]
    changed = copy.deepcopy(config)
    for name, value in new.items():
        setattr(changed, name, value)
    if not _describes(changed, model):
        return False
    for name, value in new.items():
        setattr(config, name, value)  # the one that the model's parts refer to
    return True


def _describes(config: Any, model: nn.Module) -> bool:
    """Whether a new model of this configuration has the shapes of this one."""
    try:
        with torch.device("meta"):
            fresh = type(model)(type(config).from_dict(config.to_dict()))
    except Exception:  # their code: anything may be raised
        return False
    shapes, own = ({name: x.shape for name, x in one.state_dict().items()} for one in (fresh, model))
    return shapes == own
