"""The gates of an LSTM in Triton: sums and the cell in, the state and the cell out, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 256  # of the state, a program


def gates(sums: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The new state and cell (points x hidden), of sums (points x 4 hidden: i, f, g, o) and the old cell."""
    cell = cell.contiguous()
    new_state, new_cell = torch.empty_like(cell), torch.empty_like(cell)
    _gates[(triton.cdiv(cell.numel(), SIZE),)](sums, cell, new_state, new_cell, cell.shape[1], cell.numel(), SIZE)
    return new_state, new_cell


@triton.jit
def _gates(sums, cell, new_state, new_cell, n_hidden, n_all, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n_all
    own = sums + at // n_hidden * 4 * n_hidden + at % n_hidden
    enters = tl.sigmoid(tl.load(own, inside, other=0.0).to(tl.float32))
    stays = tl.sigmoid(tl.load(own + n_hidden, inside, other=0.0).to(tl.float32))
    new = _tanh(tl.load(own + 2 * n_hidden, inside, other=0.0).to(tl.float32))
    leaves = tl.sigmoid(tl.load(own + 3 * n_hidden, inside, other=0.0).to(tl.float32))
    c = stays * tl.load(cell + at, inside, other=0.0).to(tl.float32) + enters * new
    tl.store(new_cell + at, c.to(new_cell.dtype.element_ty), inside)
    tl.store(new_state + at, (leaves * _tanh(c)).to(new_state.dtype.element_ty), inside)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1
