"""Pipeline gradual: train once; then, for each level, train the dense network again and prune it gradually.

All methods of a seed share its trained dense network. Levels do not depend on each other: each is trained for two full
schedules, whatever it keeps. `verbs/gradual.py` says when and how much is pruned.
"""

from __future__ import annotations

from typing import Any

from sipp_lab.pipelines import MaskChanges, Network, Pipeline, Prepared, RunContext
from sipp_lab.runs.plan import Stage

LAST_CUT = "the network just before the last of its cuts, in the middle of its training"


def parent(stage: Stage) -> Stage:
    """The dense stage, at every level."""
    return Stage(stage.seed, None, 0)


def prepare(context: RunContext, stage: Stage, parent_network: Network | None) -> Prepared:
    """The trained dense network, unchanged: it is pruned during training."""
    from sipp_lab.runs.context import Prepared

    assert parent_network is not None
    return Prepared(parent_network, {})


def mask_changes(context: RunContext, stage: Stage, n_steps: int) -> MaskChanges:
    """The cuts during one training, each to the share of weights in the schedule."""
    from sipp.verbs.gradual import cut_times
    from sipp_lab.training.loop import MaskChanges

    times = cut_times(n_steps)
    return MaskChanges(frozenset(times), lambda step, state: _cut_once(context, stage, step, times[step], state))


def _cut_once(
    context: RunContext, stage: Stage, step: int, t: float, state: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """New masks for the current network at time t of the schedule, and the facts to record about this cut."""
    from sipp.native.compiling import compiling_seconds
    from sipp.verbs.gradual import budget_at
    from sipp_lab.parallel.processes import share_buffers
    from sipp_lab.pipelines.shared import clock, cut_to, level_budget, rank_for
    from sipp_lab.runs.context import Network

    share_buffers(context.processes, state.model)  # all processes score the leader's network
    began, compiled = clock(), compiling_seconds()
    current = Network({key: tensor.detach().clone() for key, tensor in state.model.state_dict().items()}, state.masks)
    ranking = rank_for(context, stage, current, norm_stats="running")
    budget = budget_at(t, ranking.n_weights, level_budget(context, stage, ranking.n_weights))
    prepared = cut_to(context, stage, ranking, state.masks, budget, clock() - began)
    state.model.load_state_dict(prepared.network.state)  # sampling rescales the weights it keeps (T8)
    pruned = prepared.facts["pruned"]
    blend = pruned["choice"] and pruned["choice"]["taken"]
    path = [*state.facts.get("path", []), {"after_step": step, "keep": pruned["keep"], "blend": blend}]
    before = state.facts.get("part_seconds", {})
    spent = {**prepared.facts["part_seconds"], "compile": compiling_seconds() - compiled}
    seconds = {part: before.get(part, 0.0) + now_spent for part, now_spent in spent.items()}
    return prepared.network.masks, {**prepared.facts, "path": path, "part_seconds": seconds}


PIPELINE = Pipeline(
    description="train, then for each level train again and prune gradually",
    compared_with=LAST_CUT,
    metric="delta_top1",
    parent=parent,
    prepare=prepare,
    mask_changes=mask_changes,
    note_on_time="Scoring and cutting count all cuts of a network.",
)
