"""Provable, data-informed weight pruning for PyTorch.

    results <- inputs <- scoring <- pruning <- repairing <- bounds <- certificates <- storage <- runtime
    what is    any data   a number   kept a row    masks,     mask and     theory    holdout        files      zeros
    known                 a weight                 weights    weights                evidence                  skipped
    <- verbs: one file a public function (native, beside records, is what depends on the processor)

A model and a few data points go in; a sparse model and a statement of what was lost come out:

    pruned = sipp.prune(model, data, keep=0.15)
    print(pruned)

A public name is imported when it is first used, so `sipp --help` and `sipp report` load no torch. Type checkers read
`__init__.pyi`, which a test compares with the table below.
"""

from importlib import import_module
from typing import Any

from sipp import errors as errors

__version__ = "0.1.0"

_MODULES = {
    "Pruned": "sipp.results.pruned",
    "Scoring": "sipp.results.options",
    "assess": "sipp.verbs.assess",
    "bench": "sipp.verbs.bench",
    "certify": "sipp.verbs.certify",
    "certify_accuracy": "sipp.verbs.certify",
    "check_assumption": "sipp.bounds.assumption",
    "compare": "sipp.verbs.compare",
    "evaluate": "sipp.verbs.evaluate",
    "export": "sipp.runtime.exporting",
    "gradual": "sipp.verbs.gradual",
    "hold": "sipp.pruning.masking",
    "inspect": "sipp.verbs.inspect",
    "load": "sipp.verbs.load",
    "methods": "sipp.scoring.methods",
    "page": "sipp.report.page",
    "perplexity": "sipp.verbs.perplexity",
    "prune": "sipp.verbs.prune",
    "prune_on_disk": "sipp.verbs.prune_on_disk",
    "prune_to": "sipp.verbs.prune_to",
    "register_method": "sipp.scoring.methods",
    "release": "sipp.pruning.masking",
    "repair": "sipp.verbs.repair",
    "sample_size": "sipp.scoring.task",
    "save": "sipp.verbs.save",
    "save_folder": "sipp.verbs.save_folder",
    "sensitivity": "sipp.scoring.sensitivities",
    "shrink": "sipp.verbs.shrink",
    "sparse": "sipp.runtime.sparse_network",
    "text": "sipp.inputs.text",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sipp' has no attribute {name!r}")
    globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
