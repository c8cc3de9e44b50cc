"""Lists, tuples and dicts of tensors, taken apart and put together: torch's own functions, which it keeps private."""

from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
