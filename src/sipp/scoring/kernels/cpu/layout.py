"""How the CPU kernels lay numbers out: the sizes of a tile, and the records that compiled loops are handed.

README.md draws it. Rows and patches are padded with zeros, rows to whole ranks, patches to whole blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sipp.scoring.kernels.cpu.host import WIDE

# --- Sizes ------------------------------------------------------------------------------------------------------------

LANES = 16 if WIDE else 8  # floats of one vector register
BLOCK = 64  # patches laid out at once: one bit of an integer each
RANK = 16  # rows side by side
MOST_RANKS = 4 if WIDE else 2  # of a band: as many maxima stay in registers
PANEL = 3  # rows of one register tile of the ordinary product, both signs of each
STRIP_VECTORS = 4 if WIDE else 2  # 2 x PANEL x STRIP_VECTORS sums: 24 of 32 registers, or 12 of 16
STRIP = LANES * STRIP_VECTORS  # patches of one register tile of the ordinary product
SUM_BLOCK = 512  # terms summed before they join the total: bounds the rounding error of long sums (fixed: same bits)
MEAN_COLUMNS = 8 if WIDE else 2  # of the sums for means: 2 x MEAN_COLUMNS of them stay in registers
MOST_WEIGHTS = 512  # of a group where every product is computed, rows times fan-in: their maxima take 32 KiB

# In bytes
FLOAT = INDEX = 4
VECTOR = LANES * FLOAT
LINE = BLOCK * FLOAT  # one column of a block
CACHE_LINE = 64
RANK_VECTOR = RANK * FLOAT  # one patch, one rank, one sign in `turned`
PATCH_BYTES = 2 * RANK_VECTOR  # one patch and one rank: both signs
RANK_BYTES = BLOCK * PATCH_BYTES  # one rank of a block
SIGN_BYTES = RANK // 8  # one rank in `signs`

# --- Records ----------------------------------------------------------------------------------------------------------


class PackedWeights(NamedTuple):
    """The weights as `block_loops.denominators` reads them; `packing.pack` fills them in.

    Panel n has the rows from panels[n] to panels[n + 1]. In every SUM_BLOCK c of columns, those of a panel are sorted
    by the signs of its weights: bit i of a pattern q is set where the weight of its row i is negative.
    """

    panels: np.ndarray
    magnitudes_GX: np.ndarray  # |w| in that order, the rows of a panel side by side
    places_GNK: np.ndarray  # which column stands there
    ends_GNCQ: np.ndarray  # where the columns of pattern q end; after all ends come columns without a weight


class Layer(NamedTuple):
    """The windows of a layer and its weights.

    Patch p is position p % n of point p / n, n = len(positions). Value k of its group g lies in `source` at
    point * point_stride + g * group_stride + positions[p % n] + fan[k].
    """

    source: np.ndarray  # all the memory that the windows view
    point_stride: int
    group_stride: int
    positions: np.ndarray
    fan: np.ndarray
    factors_TB: np.ndarray  # scales the activations of point b that have sign t; 0 where there are none
    weights: PackedWeights
    row_factors_GR: np.ndarray  # take the scale of the weights out of norms
    signs_GKR: np.ndarray  # RANK bits for every column and rank of rows, set where the weight is positive


class Scratch(NamedTuple):
    """What one thread works in: a block of patches, its denominators, their reciprocals."""

    a_KP: np.ndarray  # the patches
    d_LP: np.ndarray  # line 2 r + s: denominators of row r and sign s, then their reciprocals
    outputs_RP: np.ndarray  # of the first sign of the activations, until the second is there; float64
    sums_P: np.ndarray  # of each patch before it was divided by it
    squares_XP: np.ndarray  # of both signs of weights, and of the outputs; float64
    turned: np.ndarray  # [r / RANK, p, s, r % RANK] the reciprocals with rows side by side
    scales: np.ndarray  # [r / RANK, s, r % RANK] 1 / mean of each line of them
    floors: np.ndarray  # the same shape: keeps lines of zeros out of bars
    reach: np.ndarray  # [band, p]
