"""Train once; then, for each level: train the dense network once more, and prune it little by little on the way.

All methods of one seed share its trained parent. A level needs no other level: it has seen the dense network's training
and one more of the same length, whatever it keeps. When to cut, and how much: `verbs/gradual.py`.
"""

from __future__ import annotations

from typing import Any

from sipp.experiments.pipelines import MaskChanges, Network, Pipeline, Prepared, RunContext
from sipp.experiments.runs.plan import Stage

LAST_CUT = "the network just before the last of its cuts, in the middle of its training"


def parent(stage: Stage) -> Stage:
    """The dense stage, for every level."""
    return Stage(stage.seed, None, 0)


def prepare(context: RunContext, stage: Stage, parent_network: Network | None) -> Prepared:
    """The trained dense network, as it is: it is cut while it is trained again."""
    from sipp.experiments.runs.context import Prepared

    assert parent_network is not None
    return Prepared(parent_network, {})


def mask_changes(context: RunContext, stage: Stage, n_steps: int) -> MaskChanges:
    """The cuts of one training, each to the share of weights that the schedule says."""
    from sipp.experiments.training.loop import MaskChanges
    from sipp.verbs.gradual import CUTS, cut_times

    times = cut_times(n_steps, CUTS)
    return MaskChanges(frozenset(times), lambda step, state: _cut_once(context, stage, step, times[step], state))


def _cut_once(
    context: RunContext, stage: Stage, step: int, t: float, state: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The masks at time t of the schedule, of the network as it is now, and what is known of it since this cut."""
    from sipp.experiments.parallel.processes import share_buffers
    from sipp.experiments.pipelines.shared import clock, cut_to, level_budget, rank_for
    from sipp.experiments.runs.context import Network
    from sipp.native.compiling import compiling_seconds
    from sipp.verbs.gradual import budget_at

    share_buffers(context.processes, state.model)  # all score the same network, the leader's
    began, compiled = clock(), compiling_seconds()
    current = Network({key: tensor.detach().clone() for key, tensor in state.model.state_dict().items()}, state.masks)
    ranking = rank_for(context, stage, current, norm_stats="running")
    budget = budget_at(t, ranking.n_weights, level_budget(context, stage, ranking.n_weights))
    prepared = cut_to(context, stage, ranking, state.masks, budget, clock() - began)
    state.model.load_state_dict(prepared.network.state)  # sampling changes the weights that it keeps (T8)
    blend = {} if prepared.facts["choice"] is None else {"blend": prepared.facts["choice"]["words"]}
    path = [*state.facts.get("path", []), {"after_step": step, "keep": prepared.facts["keep"], **blend}]
    before = state.facts.get("part_seconds", {})
    spent = {**prepared.facts["part_seconds"], "compile": compiling_seconds() - compiled}
    seconds = {part: before.get(part, 0.0) + now_spent for part, now_spent in spent.items()}
    bound = {**prepared.facts["bound"], "speaks_of": f"the network right after its last cut, against {LAST_CUT}"}
    return prepared.network.masks, {**prepared.facts, "bound": bound, "path": path, "part_seconds": seconds}


PIPELINE = Pipeline(
    description="train, then for each level train again and prune little by little on the way",
    compared_with=LAST_CUT,
    metric="delta_top1",
    parent=parent,
    prepare=prepare,
    mask_changes=mask_changes,
    note_on_time="Scoring and cutting count all cuts of a network.",
)
