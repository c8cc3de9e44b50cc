"""N:M patterns: of every m consecutive weights of a row, along its fan-in, at most n are kept.

The row is that of the weight as a matrix: (out, in) of a linear layer, (out, in x height x width) of a convolution, in
the order in which torch stores it. Where the fan-in is no multiple of m, the row is thought of as filled up with
zeros, as the kernels for such patterns do: its last, shorter group keeps up to n of what it has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from sipp.allocation.largest_scores import check_scores
from sipp.allocation.row_bounds import largest_in_rows
from sipp.records.options import Pattern


def largest_in_groups(score_FK: Tensor, pattern: Pattern) -> Tensor:
    """F x K bool: the n largest scores of every group of m, ties going to the smaller column."""
    check_scores([score_FK])
    n_rows, fan_in = score_FK.shape
    groups_FGM = _groups(score_FK, pattern.m, fill=-torch.inf)
    n_groups = groups_FGM.shape[1]
    kept_FG = torch.full((n_rows, n_groups), pattern.n, dtype=torch.int64, device=score_FK.device)
    if fan_in % pattern.m:
        kept_FG[:, -1] = min(pattern.n, fan_in % pattern.m)
    mask = largest_in_rows(groups_FGM.reshape(-1, pattern.m), kept_FG.reshape(-1))
    return mask.view(n_rows, n_groups * pattern.m)[:, :fan_in].contiguous()


def obeys(weight_FK: Tensor, pattern: Pattern) -> bool:
    """Whether no group of m has more than n numbers that are not zero (or, of a mask, True)."""
    return bool((_groups(weight_FK != 0, pattern.m, fill=0).sum(2) <= pattern.n).all())


def breaking(tensors: Mapping[str, Tensor], pattern: Pattern) -> list[str]:
    """The names of those masks or weights that do not obey the pattern; empty: all do.

    Rows lie along the first axis; matrices that some models store the other way round (inputs x outputs) may obey it
    down their columns.
    """
    found = []
    for name, tensor in tensors.items():
        matrix_FK = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
        if not obeys(matrix_FK, pattern) and not (tensor.dim() == 2 and obeys(matrix_FK.t(), pattern)):
            found.append(name)
    return found


def _groups(matrix_FK: Tensor, m: int, fill: float) -> Tensor:
    """F x G x m: the rows, filled up to whole groups."""
    n_rows, fan_in = matrix_FK.shape
    n_groups = -(-fan_in // m)
    return F.pad(matrix_FK, (0, n_groups * m - fan_in), value=fill).reshape(n_rows, n_groups, m)
