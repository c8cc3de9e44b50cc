"""N:M patterns: of every m consecutive weights of a row, along its fan-in, at most n are kept.

The row is that of the weight as a matrix: (out, in) of a linear layer, (out, in x height x width) of a convolution, in
the order in which torch stores it. Where the fan-in is no multiple of m, the row is thought of as filled up with
zeros, as the kernels for such patterns do: its last, shorter group keeps up to n of what it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sipp.allocation.largest_scores import check_scores
from sipp.allocation.row_bounds import largest_in_rows
from sipp.errors import OptionError

MOST_GROUP = 2**20
_FORM = re.compile(r"([0-9]{1,7}):([0-9]{1,7})", re.ASCII)


@dataclass(frozen=True)
class Pattern:
    """n of every m consecutive weights."""

    n: int
    m: int

    def kept(self, fan_in: int) -> int:
        """How many weights a row of this fan-in keeps."""
        return fan_in // self.m * self.n + min(self.n, fan_in % self.m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


def pattern_of(text: Any) -> Pattern:
    """The pattern that "2:4" names; an OptionError where it names none."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    n, m = (int(found.group(1)), int(found.group(2))) if found is not None else (0, 0)
    if not 1 <= n <= m <= MOST_GROUP:
        raise OptionError(
            f"pattern={text!r:.60} is no pattern n:m with 1 <= n <= m",
            fix="give for example pattern='2:4': two of every four weights are kept",
            option="pattern",
        )
    return Pattern(n, m)


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
