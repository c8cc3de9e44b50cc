"""Provable, data-informed weight pruning for PyTorch.

    records <- inputs <- scoring <- allocation <- pruning <- repairing <- bounds <- certificates <- storage <- runtime
    what is    any data   a number   kept a row    masks,     mask and     theory    held-out       files      zeros
    known                 a weight                 weights    weights                evidence                  skipped
    <- verbs: one file a public function

A model and a few data points go in; a sparse model and a statement of what was lost come out:

    pruned = sipp.prune(model, data, keep=0.15)
    print(pruned)

A public name is imported when it is first asked for: `sipp --help` and `sipp report` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sipp import errors as errors

if TYPE_CHECKING:  # what a type checker reads; a test compares it with the table below
    from sipp.bounds.assumption import check_assumption as check_assumption
    from sipp.bounds.sound.graph_bound import sound_bound as sound_bound
    from sipp.pruning.masking import hold as hold
    from sipp.pruning.masking import release as release
    from sipp.records.options import Constants as Constants
    from sipp.records.options import Scoring as Scoring
    from sipp.records.pruned import Pruned as Pruned
    from sipp.report.page import page as page
    from sipp.runtime.sparse_network import sparse as sparse
    from sipp.scoring.sensitivities import sensitivity as sensitivity
    from sipp.scoring.theory_points import sample_size as sample_size
    from sipp.verbs.assess import assess as assess
    from sipp.verbs.certify import certify as certify
    from sipp.verbs.certify import certify_accuracy as certify_accuracy
    from sipp.verbs.compare import compare as compare
    from sipp.verbs.gradual import gradual as gradual
    from sipp.verbs.inspect import inspect as inspect
    from sipp.verbs.load import load as load
    from sipp.verbs.prune import prune as prune
    from sipp.verbs.prune_to import prune_to as prune_to
    from sipp.verbs.repair import repair as repair
    from sipp.verbs.save import save as save
    from sipp.verbs.save_folder import save_folder as save_folder

__version__ = "0.1.0"

_MODULES = {
    "Constants": "sipp.records.options",
    "Pruned": "sipp.records.pruned",
    "Scoring": "sipp.records.options",
    "assess": "sipp.verbs.assess",
    "certify": "sipp.verbs.certify",
    "certify_accuracy": "sipp.verbs.certify",
    "check_assumption": "sipp.bounds.assumption",
    "compare": "sipp.verbs.compare",
    "gradual": "sipp.verbs.gradual",
    "hold": "sipp.pruning.masking",
    "inspect": "sipp.verbs.inspect",
    "load": "sipp.verbs.load",
    "page": "sipp.report.page",
    "prune": "sipp.verbs.prune",
    "prune_to": "sipp.verbs.prune_to",
    "release": "sipp.pruning.masking",
    "repair": "sipp.verbs.repair",
    "sample_size": "sipp.scoring.theory_points",
    "save": "sipp.verbs.save",
    "save_folder": "sipp.verbs.save_folder",
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
