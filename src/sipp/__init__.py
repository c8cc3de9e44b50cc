"""Provable, data-informed weight pruning for PyTorch.

    net, data -> inputs -> scoring -> allocation -> pruning -> repairing -> bounds -> certificates -> storage -> report
                 patches   one number  kept a row   weights,   refit,       theory    held-out
                           a weight                 masks      polish

A model and a few data points go in; a sparse model and a statement of what was lost come out:

    pruned = sipp.prune(model, data, keep=0.15)
    print(pruned)

A public name is imported when it is first asked for: `sipp --help` and `sipp report` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sipp import errors as errors

if TYPE_CHECKING:  # what a type checker reads; a test compares it with the table below
    from sipp.bounds.assessing import assess as assess
    from sipp.bounds.assumption import check_assumption as check_assumption
    from sipp.bounds.sound.graph_bound import sound_bound as sound_bound
    from sipp.certificates.claims import certify as certify
    from sipp.certificates.claims import certify_accuracy as certify_accuracy
    from sipp.certificates.comparing import compare as compare
    from sipp.options import Constants as Constants
    from sipp.options import Scoring as Scoring
    from sipp.pruning.entry import prune as prune
    from sipp.pruning.little_by_little import gradual as gradual
    from sipp.pruning.masking import hold as hold
    from sipp.pruning.masking import release as release
    from sipp.pruning.result import Pruned as Pruned
    from sipp.pruning.tolerance import prune_to as prune_to
    from sipp.repairing.entry import repair as repair
    from sipp.report.entry import page as page
    from sipp.runtime.sparse_network import sparse as sparse
    from sipp.scoring.sensitivities import sensitivity as sensitivity
    from sipp.scoring.theory_points import sample_size as sample_size
    from sipp.storage.artifact import inspect as inspect
    from sipp.storage.artifact import load as load
    from sipp.storage.artifact import save as save

__version__ = "0.1.0"

_MODULES = {
    "Constants": "sipp.options",
    "Pruned": "sipp.pruning.result",
    "Scoring": "sipp.options",
    "assess": "sipp.bounds.assessing",
    "certify": "sipp.certificates.claims",
    "certify_accuracy": "sipp.certificates.claims",
    "check_assumption": "sipp.bounds.assumption",
    "compare": "sipp.certificates.comparing",
    "gradual": "sipp.pruning.little_by_little",
    "hold": "sipp.pruning.masking",
    "inspect": "sipp.storage.artifact",
    "load": "sipp.storage.artifact",
    "page": "sipp.report.entry",
    "prune": "sipp.pruning.entry",
    "prune_to": "sipp.pruning.tolerance",
    "release": "sipp.pruning.masking",
    "repair": "sipp.repairing.entry",
    "sample_size": "sipp.scoring.theory_points",
    "save": "sipp.storage.artifact",
    "sensitivity": "sipp.scoring.sensitivities",
    "sound_bound": "sipp.bounds.sound.graph_bound",
    "sparse": "sipp.runtime.sparse_network",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sipp' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
