"""The glossary of the page."""

from __future__ import annotations

from sipp.report.palette import REPAIRED, SEPARATOR
from sipp.scoring import METHODS

MOVED = "distance between the outputs of the pruned and the dense network, as a share of the dense output's norm"
WORDS = {
    "keep": "share of the prunable weights that are kept: keep 10 % means 90 % zeros",
    "dense": "the network before pruning",
    "dead rows": "rows (outputs of a layer) that lost all their weights and output only a bias",
    "output moves by": MOVED,
    "output moved": MOVED,
    "guarantee": "measured on inputs that neither network has seen; holds for new inputs from the same source",
    "certified within": "guaranteed for new inputs from the source of the holdout, with the certificate's confidence",
    "prunable weights": "weights of linear, convolutional, recurrent and attention layers; biases and norms stay",
}
_ABOUT = {row.name: row.about for row in METHODS}


def about_method(arm: str) -> str:
    """What a method does, in a line; one that the package does not know is the user's own."""
    name, _, form = arm.partition(SEPARATOR)
    words = _ABOUT.get(name, "a score from the user's own code")
    if form == REPAIRED:
        return f"{words}; then mask and weights were fitted to the dense network without labels"
    return f"{words}; with the {form} over patches" if form else words
