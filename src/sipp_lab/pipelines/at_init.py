"""Pipeline at-init: for each level, prune the initial network, then train.

All methods of a seed share its initial network.
"""

from __future__ import annotations

from sipp_lab.pipelines.cutting import cut_to, level_budget
from sipp_lab.pipelines.pipeline import Pipeline
from sipp_lab.runs.context import Network, Prepared, RunContext
from sipp_lab.runs.records import Stage


def prepare(context: RunContext, stage: Stage, network: Network) -> Prepared:
    """The initial network, pruned to the budget of this level. Its running statistics say nothing yet."""
    return cut_to(context, stage, network, level_budget(context, stage, network), norm_stats="batch")


PIPELINE = Pipeline(
    description="prune the initial network to each level, then train",
    compared_with="the initial network, untrained like the pruned one",
    metric="top1",
    prepare=prepare,
)
