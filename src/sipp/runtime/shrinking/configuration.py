"""Writes new widths into the configuration of a Hugging Face model, so that `from_pretrained` builds the small one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sipp.errors import warn_caller
from sipp.results import ChannelsLeft

WIDTHS = ("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim")  # of MLPs
HEADS, KEY_HEADS = "num_attention_heads", "num_key_value_heads"


def match_configuration(model: nn.Module, sites: Iterable[ChannelsLeft]) -> None:
    """Sets the widths in `model.config`, if it has one; warns if it cannot describe the model then."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return
    new = _new_values(config, {(site.before, site.after) for site in sites})
    made = None if new is None else _with_values(config, new)
    if new is None or made is None or not _describes(made, model):
        warn_caller(
            "the configuration cannot describe the smaller network, so from_pretrained would not load it: "
            "use uniform=True"
        )
        return
    for name, value in new.items():
        setattr(config, name, value)  # the one that the model's parts refer to


def accepts_widths(model: nn.Module, changes: Iterable[tuple[int, int]]) -> bool:
    """Whether the model's configuration, if it has one, accepts these widths, each before and after.

    Some refuse numbers of heads that do not divide their hidden size.
    """
    config: Any = getattr(model, "config", None)
    new = _new_values(config, set(changes)) if hasattr(config, "to_dict") else {}
    return not new or _with_values(config, new) is not None


def _new_values(config: Any, changes: set[tuple[int, int]]) -> dict[str, int] | None:
    """The entries of a configuration that change; None if one width would become several."""
    to = dict(changes)
    if len(to) < len(changes):
        return None
    new = {name: to[width] for name in WIDTHS if (width := getattr(config, name, None)) in to}
    n_heads = getattr(config, HEADS, None)
    n_key_heads = getattr(config, KEY_HEADS, None) or n_heads
    if n_heads and n_key_heads in to:
        new |= {HEADS: n_heads // n_key_heads * to[n_key_heads]}
        if getattr(config, KEY_HEADS, None):
            new[KEY_HEADS] = to[n_key_heads]
    return new


def _with_values(config: Any, new: dict[str, int]) -> Any:
    """A configuration with these entries, as it would be read from a file; None if it refuses them."""
    changed = copy.deepcopy(config)
    try:
        for name, value in new.items():
            setattr(changed, name, value)
        return type(config).from_dict(changed.to_dict())
    except Exception:  # their code: anything may be raised
        return None


def _describes(config: Any, model: nn.Module) -> bool:
    """Whether a new model of this configuration has the shapes of this one."""
    try:
        with torch.device("meta"):
            fresh = type(model)(config)
    except Exception:  # their code: anything may be raised
        return False
    shapes, own = ({name: x.shape for name, x in one.state_dict().items()} for one in (fresh, model))
    return shapes == own
