"""Provable, data-informed weight pruning for PyTorch.

    model + data -> capture -> sensitivity -> budget -> sparsify -> bounds -> certify -> report
                     patches    scores        kept/row  weights+masks  theory   held-out

A model and a few data points go in; a sparse model and a statement of what was lost come out:

    pruned = sipp.prune(model, data, keep=0.15)
    print(pruned)
"""

from sipp.bounds.assessing import assess
from sipp.bounds.assumption import check_assumption
from sipp.bounds.sound.graph_bound import sound_bound
from sipp.certificates.claims import certify, certify_accuracy
from sipp.pruning.entry import prune
from sipp.pruning.masking import hold, release
from sipp.pruning.result import Pruned
from sipp.pruning.tolerance import prune_to
from sipp.runtime.entry import sparse
from sipp.scoring.sensitivities import sensitivity
from sipp.scoring.theory_points import sample_size

__version__ = "0.1.0"
__all__ = [
    "Pruned",
    "assess",
    "certify",
    "certify_accuracy",
    "check_assumption",
    "hold",
    "prune",
    "prune_to",
    "release",
    "sample_size",
    "sensitivity",
    "sound_bound",
    "sparse",
]
