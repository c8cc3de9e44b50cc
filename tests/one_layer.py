"""Rows of one layer, as pruning makes them and states their bound."""

from typing import Any

from torch import Tensor

from sipp.allocation.row_bounds import largest_in_rows, tail_sum
from sipp.pruning.sparse_rows import SparseRows, sparsify_layers


def sparsify(weight_FK: Tensor, sensitivity_FK: Tensor, kept_F: Tensor, **options: Any) -> SparseRows:
    """The rows of the only layer."""
    return sparsify_layers([weight_FK], [sensitivity_FK], [kept_F], **options)[0]


def eps_det(sensitivity_FK: Tensor, kept_F: Tensor, *, c_constant: float) -> Tensor:
    """T5: C times the sum of all but the m largest sensitivities of each row."""
    return c_constant * tail_sum(sensitivity_FK, largest_in_rows(sensitivity_FK, kept_F))
