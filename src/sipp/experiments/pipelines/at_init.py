"""Initialise; for each level of the same ladder: prune the initial network once, train.

All methods of one seed share its initial network.
"""

from __future__ import annotations

from typing import Any

from sipp.experiments.pipelines import Network, Pipeline, Prepared, RunContext, no_parent
from sipp.experiments.runs.plan import Stage


def prepare(context: RunContext, stage: Stage, parent_network: Network | None) -> Prepared:
    """The initial network, cut to the weights of this level of the ladder."""
    from sipp.experiments.pipelines.shared import clock, cut_to, level_budget

    began = clock()
    ranking = _ranking(context, stage)
    scored_in = clock() - began
    return cut_to(context, stage, ranking, {}, level_budget(context, stage, ranking.n_weights), scored_in)


def _ranking(context: RunContext, stage: Stage) -> Any:
    """The scores of the initial network: the first level of a method scores for all of them."""
    from sipp.experiments.pipelines.shared import rank_for
    from sipp.experiments.runs.context import initial_network

    first = Stage(stage.seed, stage.method, 0)
    if first not in context.memory:
        context.memory.clear()  # one ranking holds all scores of a network
        # An untrained network has no running statistics worth the name.
        context.memory[first] = rank_for(context, first, initial_network(context, stage.seed), norm_stats="batch")
    return context.memory[first]


PIPELINE = Pipeline(
    description="prune the initial network to each level, then train",
    compared_with="the initial network, untrained like the pruned one",
    metric="top1",
    parent=no_parent,
    prepare=prepare,
    note_on_time="One scoring pass serves all levels of a method and counts at the first.",
)
