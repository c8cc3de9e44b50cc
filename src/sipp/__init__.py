"""Provable, data-informed weight pruning for PyTorch.

    model + data -> capture -> sensitivity -> budget -> sparsify -> bounds -> certify -> report
                     patches    scores        kept/row  weights+masks  theory   held-out

A model and a few data points go in; a sparse model and a statement of what was lost come out:

    pruned = sipp.prune(model, data, keep=0.15)
    print(pruned)
"""

from sipp.assumption import check_assumption
from sipp.certify import certify, certify_accuracy
from sipp.given import assess
from sipp.graphbound import sound_bound
from sipp.masking import hold, release
from sipp.prune import prune
from sipp.prune_to import prune_to
from sipp.pruned import Pruned
from sipp.sample_size import sample_size
from sipp.sensitivity import sensitivity

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
]
