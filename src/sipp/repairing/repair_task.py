"""What one repair is to do, and what is best for a network of a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from sipp.results import ChunkBytes, Pattern, PeerMethod, RepairMethod

PEERS: tuple[PeerMethod, ...] = get_args(PeerMethod)  # methods of others, by their definitions

ERROR_FEEDBACK = 1.0  # a of T21; on ResNet20 and on digits 0.25 costs one to three points
# a = 1 repeats in each block what earlier ones lost, which a deep network of linear layers does not bear (SmolLM2 at
# half of its weights: perplexity 20.9 with 1, 20.5 with this)
LARGE_ERROR_FEEDBACK = 0.25
RIDGE = 1e-3  # a share of the mean diagonal, towards the dense weights
REFIT_RIDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # the mask of a score may need a larger one if there are few points


@dataclass(frozen=True, kw_only=True)
class RepairTask:
    """What one repair is to do, as `PruneOptions` and the ranking say. None is what suits method and network.

    With a `floor`, no row dies that has a weight in the first masks. The last four are not options of a caller:
    benchmarks and tests switch parts of the search off with them.
    """

    method: RepairMethod = "joint"
    floor: float | None = None
    pattern: Pattern | None = None
    chunk_bytes: ChunkBytes = "auto"
    error_feedback: float | None = None
    ridges: tuple[float, ...] | None = None  # the validation points choose one for each layer
    keeps_budgets: bool = False  # a search leaves each layer as many weights as it had
    corrects_streams: bool = True  # the ends of residual blocks compensate the error of the stream
