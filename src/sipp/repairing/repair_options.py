"""How a network is repaired: the options of the caller, and the candidates for a network of this kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from torch import Tensor

from sipp.errors import OptionError
from sipp.results.options import ChunkBytes, Pattern, PeerMethod, RepairMethod
from sipp.results.ranking import Weight, is_like_a_language_model
from sipp.results.repair import Budgets

PEERS: tuple[PeerMethod, ...] = get_args(PeerMethod)  # methods of others, by their definitions

ERROR_FEEDBACKS = (1.0, 0.25, 0.0)  # candidates for a, tried in this order as long as the error falls
# Trials fit only the first layers of a large network, which favours a = 1: its cost shows in deep networks of linear
# layers only (SmolLM2 at half of its weights: perplexity 20.9 with 1, 20.5 with this). Budgets by magnitude are not
# tried there either.
LARGE_ERROR_FEEDBACKS = (0.25,)
RIDGES = (1e-3, 1e-4)  # shares of the mean diagonal, towards the dense weights
REFIT_RIDGES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # the mask of a score may need a larger one if there are few points
LARGE_RIDGES = RIDGES[:1]  # of SmolLM2's 210 weights it was chosen for 209

BUDGETS: tuple[Budgets, ...] = ("given", "between", "magnitude", "even")
LEARNING_RATE = 2e-3  # of the polish


@dataclass(frozen=True)
class RepairOptions:
    """The options of a repair. If several values are given, the validation points choose among them.

    None means what suits the method and the network. With a `floor`, no row dies that has a weight in the first
    masks, and budgets by magnitude leave each layer at least that share of an even cut. `corrects_streams`:
    the ends of residual blocks compensate the error of the stream. `steps` polish the network; the validation points stop that.
    """

    method: RepairMethod = "joint"
    error_feedbacks: tuple[float, ...] | None = None
    ridges: tuple[float, ...] | None = None
    budgets: tuple[Budgets, ...] | None = None
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
        feedbacks = self.error_feedbacks
        if feedbacks is not None and (not feedbacks or not all(0 <= a <= 1 for a in feedbacks)):
            raise OptionError(
                f"error_feedbacks={feedbacks!r} are not in [0, 1]",
                fix="give one number, or several to choose from",
                option="error_feedbacks",
            )


@dataclass(frozen=True)
class Candidates:
    """The values to choose from for one network; a single value is used without a trial."""

    error_feedbacks: tuple[float, ...]
    ridges: tuple[float, ...]
    budgets: tuple[Budgets, ...]


def candidates_for(options: RepairOptions, weights: Mapping[str, Weight], masks: Mapping[str, Tensor]) -> Candidates:
    """The values to try if the caller gives none."""
    is_large = is_like_a_language_model(list(weights.values()), masks)
    feedbacks: tuple[float, ...] = LARGE_ERROR_FEEDBACKS if is_large else ERROR_FEEDBACKS
    ridges: tuple[float, ...] = LARGE_RIDGES if is_large else RIDGES
    budgets: tuple[Budgets, ...] = tuple(kind for kind in BUDGETS if not is_large or kind != "magnitude")
    if options.method == "refit":
        feedbacks, ridges = feedbacks[:1], ridges if is_large else REFIT_RIDGES
    found = Candidates(options.error_feedbacks or feedbacks, options.ridges or ridges, options.budgets or budgets)
    if options.method in PEERS:
        found = replace(found, error_feedbacks=(0.0,))
    is_free = options.method == "joint" and options.pattern is None
    return found if is_free else replace(found, budgets=("given",))
