"""What a type checker sees of the package: every public name, where it is."""

from sipp import errors as errors
from sipp.bounds.assumption import check_assumption as check_assumption
from sipp.inputs.text import text as text
from sipp.pruning.masking import hold as hold
from sipp.pruning.masking import release as release
from sipp.report.page import page as page
from sipp.results.options import Scoring as Scoring
from sipp.results.pruned import Pruned as Pruned
from sipp.runtime.exporting import export as export
from sipp.runtime.sparse_network import sparse as sparse
from sipp.scoring.methods import methods as methods
from sipp.scoring.methods import register_method as register_method
from sipp.scoring.sensitivities import sensitivity as sensitivity
from sipp.scoring.task import sample_size as sample_size
from sipp.verbs.assess import assess as assess
from sipp.verbs.bench import bench as bench
from sipp.verbs.certify import certify as certify
from sipp.verbs.certify import certify_accuracy as certify_accuracy
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

__version__: str
__all__: list[str]
