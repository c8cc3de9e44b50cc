"""Flattens and rebuilds nested lists, tuples and dicts of tensors, by torch's own (private) functions."""

from torch.utils._pytree import (
    tree_flatten as tree_flatten,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_unflatten as tree_unflatten,
)
