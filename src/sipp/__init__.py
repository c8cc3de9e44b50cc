"""Provable, data-informed weight pruning for PyTorch.

    model + data -> capture -> sensitivity -> budget -> sparsify -> bounds -> certify -> report
                     patches    scores        kept/row  weights+masks  theory   held-out

A model and a few data points go in; a sparse model and a statement of what was lost come out:

    pruned = sipp.prune(model, data, keep=0.15)
    print(pruned)
"""

from sipp.masking import hold, release
from sipp.prune import Pruned, prune
from sipp.sample_size import sample_size
from sipp.sensitivity import sensitivity

__version__ = "0.1.0"
__all__ = ["Pruned", "hold", "prune", "release", "sample_size", "sensitivity"]
