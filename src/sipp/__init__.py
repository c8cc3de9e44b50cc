"""Provable, data-informed weight pruning for PyTorch.

A model and a few data points go in; a sparse model and a statement of what was lost come out:

    pruned = sipp.prune(model, data, keep=0.15)
    print(pruned)

A public name is imported when it is first used, so `sipp --help` and `sipp report` load no torch. CONTRIBUTING.md
draws the rooms of the package.
"""

from typing import TYPE_CHECKING

from sipp import errors as errors
from sipp.doors import door

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sipp.bounds.assumption import check_assumption as check_assumption
    from sipp.bounds.sample_size import sample_size as sample_size
    from sipp.inputs.text import text as text
    from sipp.pruning.masking import hold as hold, release as release
    from sipp.report.page import page as page
    from sipp.results.pruned import Pruned as Pruned
    from sipp.runtime.exporting import export as export
    from sipp.runtime.sparse_network import sparse as sparse
    from sipp.scoring.methods import methods as methods, register_method as register_method
    from sipp.scoring.sensitivities import sensitivity as sensitivity
    from sipp.verbs.assess import assess as assess
    from sipp.verbs.bench import bench as bench
    from sipp.verbs.certify import certify as certify, certify_accuracy as certify_accuracy
    from sipp.verbs.compare import compare as compare
    from sipp.verbs.evaluate import evaluate as evaluate
    from sipp.verbs.gradual import gradual as gradual
    from sipp.verbs.inspect import inspect as inspect
    from sipp.verbs.load import load as load
    from sipp.verbs.perplexity import perplexity as perplexity
    from sipp.verbs.prune import prune as prune
    from sipp.verbs.prune_on_disk import prune_on_disk as prune_on_disk
    from sipp.verbs.prune_to import prune_to as prune_to
    from sipp.verbs.repair import repair as repair
    from sipp.verbs.save import save as save
    from sipp.verbs.save_folder import save_folder as save_folder
    from sipp.verbs.shrink import shrink as shrink
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
