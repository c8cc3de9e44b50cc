"""Scores of all rows and a budget in, which or how many weights each row keeps out (T7, T10).

`largest` is the optimum for SiPP-det (and for every baseline that ranks weights); `allocate` is OptAlloc for SiPP-rand
and SiPP-hybrid, and `allocation_problem` and `allocate_within` are its two halves, for many budgets. Lists hold one
tensor per layer; rows of different layers may differ in fan-in.
"""

from sipp.allocation.even import even_layers, even_rows
from sipp.allocation.floors import best_of_rows, largest_above_floor, least_of_layers
from sipp.allocation.largest_scores import largest, order_of
from sipp.allocation.optimal import (
    AllocationProblem,
    Relaxed,
    allocate,
    allocate_within,
    allocation_problem,
    relax,
    relax_within,
)
from sipp.allocation.patterns import largest_in_groups
from sipp.allocation.row_bounds import draws_for, expected_kept
from sipp.records.pattern import Pattern, pattern_of

__all__ = [
    "AllocationProblem",
    "Pattern",
    "Relaxed",
    "allocate",
    "allocate_within",
    "allocation_problem",
    "best_of_rows",
    "draws_for",
    "even_layers",
    "even_rows",
    "expected_kept",
    "largest",
    "largest_above_floor",
    "largest_in_groups",
    "least_of_layers",
    "order_of",
    "pattern_of",
    "relax",
    "relax_within",
]
