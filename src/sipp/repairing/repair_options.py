"""How a network is repaired: the options of the caller, and what is best for a network of this kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from sipp.errors import OptionError
from sipp.results import ChunkBytes, Pattern, PeerMethod, RepairMethod

PEERS: tuple[PeerMethod, ...] = get_args(PeerMethod)  # methods of others, by their definitions

ERROR_FEEDBACK = 1.0  # a of T21; on ResNet20 and on digits 0.25 costs one to three points
# a = 1 repeats in each block what earlier ones lost, which a deep network of linear layers does not bear (SmolLM2 at
# half of its weights: perplexity 20.9 with 1, 20.5 with this)
LARGE_ERROR_FEEDBACK = 0.25
RIDGE = 1e-3  # a share of the mean diagonal, towards the dense weights
REFIT_RIDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # the mask of a score may need a larger one if there are few points
LEARNING_RATE = 2e-3  # of the polish
MOST_STEPS = 10_000_000  # of the polish; a larger number is taken for a mistake


@dataclass(frozen=True)
class RepairOptions:
    """The options of a repair; None means what suits the method and the network.

    Of several `ridges`, the validation points choose one for each layer. With `keeps_budgets`, a search leaves each
    layer as many weights as it had. With a `floor`, no row dies that has a weight in the first masks.
    `corrects_streams`: the ends of residual blocks compensate the error of the stream. `steps` polish the network; the
    validation points stop that.
    """

    method: RepairMethod = "joint"
    error_feedback: float | None = None
    ridges: tuple[float, ...] | None = None
    keeps_budgets: bool = False
    floor: float | None = None
    pattern: Pattern | None = None
    corrects_streams: bool = True
    blocks: str | None = None
    steps: int = 0
    learning_rate: float = LEARNING_RATE
    seed: int = 0
    chunk_bytes: ChunkBytes = "auto"
    progress: bool = False

    def __post_init__(self) -> None:
        if self.error_feedback is not None and not 0 <= self.error_feedback <= 1:
            raise OptionError(f"error_feedback={self.error_feedback!r} is not in [0, 1]", option="error_feedback")
