"""Pipeline iterative: train once; then, level by level, prune what is left and retrain with the full schedule.

All methods of a seed share its trained dense network.
"""

from __future__ import annotations

from sipp_lab.pipelines.cutting import cut_to, level_budget
from sipp_lab.pipelines.pipeline import Pipeline
from sipp_lab.runs.context import Network, Prepared, RunContext
from sipp_lab.runs.records import Stage


def parent(stage: Stage) -> Stage:
    """The previous level; the dense stage for the first level."""
    return Stage(stage.seed, stage.method, stage.level - 1) if stage.level > 1 else stage.dense


def prepare(context: RunContext, stage: Stage, network: Network) -> Prepared:
    """The trained network of the previous level, pruned to the budget of this one."""
    return cut_to(context, stage, network, level_budget(context, stage, network))


PIPELINE = Pipeline(
    description="train, then prune and retrain level by level",
    compared_with="the network it was pruned from",
    metric="delta_top1",
    parent=parent,
    prepare=prepare,
)
