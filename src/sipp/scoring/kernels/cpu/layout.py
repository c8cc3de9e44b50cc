"""How the CPU kernels lay numbers out: the sizes of a tile, and the records that compiled loops are handed.

README.md draws it. Rows and patches are padded with zeros, rows to whole tiles, patches to whole blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sipp.native import processor, reading, vector

# --- Sizes ------------------------------------------------------------------------------------------------------------

BLOCK = 64  # patches laid out at once: one bit of an integer each
ROW_TILE = 16  # rows side by side
MOST_TILES = 4 if processor.WIDE else 2  # of a band: as many maxima stay in registers
PANEL = 3  # rows of one register tile of the ordinary product, both signs of each
STRIP_VECTORS = 4 if processor.WIDE else 2  # 2 x PANEL x STRIP_VECTORS sums: 24 of 32 registers, or 12 of 16
STRIP = processor.LANES * STRIP_VECTORS  # patches of one register tile of the ordinary product
SUM_BLOCK = 512  # terms summed before they join the total: bounds the rounding error of long sums (fixed: same bits)
MEAN_COLUMNS = (
    6 if processor.WIDE else 2
)  # of the sums for means: their signs stay in registers, of which there are 7 (or few)
FEW_COLUMNS = 3 if processor.WIDE else 1  # of those that are left
MOST_WEIGHTS = 512  # of a group where every product is computed, rows times fan-in: their maxima take 32 KiB

# In bytes
INDEX_BYTES = 4
VECTOR = processor.LANES * vector.FLOAT_BYTES
LINE = BLOCK * vector.FLOAT_BYTES  # one column of a block
TILE_VECTOR = ROW_TILE * vector.FLOAT_BYTES  # one patch, one tile, one sign in `transposed`
PATCH_BYTES = 2 * TILE_VECTOR  # one patch and one tile: both signs
TILE_BYTES = BLOCK * PATCH_BYTES  # one tile of a block
SIGN_BYTES = ROW_TILE // 8  # one tile in `signs`

# --- Records ----------------------------------------------------------------------------------------------------------

# A record holds tensors and whole numbers in Python, and `as_numbers` of it is what compiled code is handed: addresses
# in place of the tensors. Who calls compiled code holds the record until it is back.

Array = Any  # a tensor in Python, its address in compiled code


class PackedWeights(NamedTuple):
    """The weights as `denominators.py` lays them out.

    Panel n has the rows from panels[n] to panels[n + 1]. In every SUM_BLOCK c of columns, those of a panel are sorted
    by the signs of its weights: bit i of a pattern q is set where the weight of its row i is negative.
    """

    n_groups: int
    n_rows: int
    fan_in: int
    n_panels: int
    n_chunks: int
    panels: Array
    magnitudes_GX: Array  # |w| in that order, the rows of a panel side by side
    places_GNK: Array  # which column stands there
    ends_GNCQ: Array  # where the columns of pattern q end; after all ends come columns without a weight


class Layer(NamedTuple):
    """The windows of a layer (their form, then what belongs to one call), and what is known of its rows.

    Patch p is position p % n of point p / n, n = n_positions. Value k of its group g lies in `source` at
    point * point_stride + g * group_stride + positions[p % n] + fan[k].
    """

    n_points: int
    point_stride: int
    group_stride: int
    n_positions: int
    positions: Array
    fan: Array
    n_summed: int  # patches whose squares are one sum: BLOCK where blocks are of one point each, else 1
    step: int  # how far most patches lie from the one before
    source: int  # where the windows begin
    factors_TB: Array  # scales the activations of point b that have sign t; 0 where there are none
    has_positive: int  # whether any activation is
    has_negative: int
    n_tiles: int
    row_factors_GR: int  # address; take the scale of the weights out of norms
    signs_GKR: int  # address; ROW_TILE bits for every column and tile of rows, set where the weight is positive


NOTHING = 0  # the address of what is not called


class Calls(NamedTuple):
    """Where the functions lie that do the work for a block (`CompiledLoop`): those that this layer needs."""

    gather: int = NOTHING  # `blocks.gather_runs` or `gather_apart`
    denominators: int = NOTHING
    lay_out: int = NOTHING
    transpose_lines: int = NOTHING  # not called where every product is computed
    raise_lines: int = NOTHING  # `maxima.raise_best` or `every_product.raise_by_all`
    add_means: int = NOTHING  # `means.add_means` or `add_part`


class Scratch(NamedTuple):
    """Addresses of what one thread works in: a block of patches, its denominators, their reciprocals."""

    a_KP: int  # the patches
    d_LP: int  # line 2 r + s: denominators of row r and sign s
    n_computed: int  # one number: the (row, column, patch) triples computed so far
    outputs_RP: int  # of the first sign of the activations, until the second is there; float64
    sums_P: int  # of each patch before it was divided by it
    squares_XP: int  # of both signs of weights, and of the outputs; float64
    offsets_P: int  # where each patch lies in the windows
    factors_P: int  # what each patch is multiplied by
    transposed: int  # [r / ROW_TILE, p, s, r % ROW_TILE] their reciprocals with rows side by side
    scales: int  # [r / ROW_TILE, s, r % ROW_TILE] 1 / mean of each line of them
    floors: int  # the same shape: keeps lines of zeros out of bars
    reach: int  # [band, p]
    bars_K: int
    masks_K: int  # bit p: patch p is above the bar of the column


read_weights, read_layer, read_calls, read_scratch = map(reading, (PackedWeights, Layer, Calls, Scratch))
