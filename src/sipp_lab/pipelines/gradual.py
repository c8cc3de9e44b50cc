"""Pipeline gradual: train once; then, for each level, train the dense network again and prune it gradually.

All methods of a seed share its trained dense network. Levels do not depend on each other: each is trained for two full
schedules, whatever it keeps. `sipp.results.gradual` says when and how much is pruned.
"""

from __future__ import annotations

from typing import Any

from sipp.results import budget_at, cut_times
from sipp_lab.parallel.processes import share_buffers
from sipp_lab.pipelines.cutting import cut_to, level_budget, n_prunable
from sipp_lab.pipelines.pipeline import Pipeline
from sipp_lab.runs.context import Network, Prepared, RunContext
from sipp_lab.runs.records import Stage
from sipp_lab.training.loop import MaskChanges, TrainState


def prepare(context: RunContext, stage: Stage, network: Network) -> Prepared:
    """The trained dense network, unchanged: it is pruned during training."""
    return network, {}


def mask_changes(context: RunContext, stage: Stage, n_steps: int) -> MaskChanges:
    """The cuts during one training, each to the share of weights in the schedule."""
    times = cut_times(n_steps)
    return MaskChanges(frozenset(times), lambda step, state: _cut_once(context, stage, step, times[step], state))


def _cut_once(
    context: RunContext, stage: Stage, step: int, t: float, state: TrainState
) -> tuple[dict[str, Any], dict[str, Any]]:
    """New masks for the current network at time t of the schedule, and the facts to record about this cut."""
    share_buffers(context.processes, state.model)  # the leader's network is scored
    current = Network.of(state.model, state.masks)
    budget = budget_at(t, n_prunable(context, current), level_budget(context, stage, current))
    cut, facts = cut_to(context, stage, current, budget)
    state.model.load_state_dict(cut.state)  # sampling rescales the weights it keeps (T8)
    pruned, before = facts["pruned"], state.facts.get("part_seconds", {})
    blend = pruned["choice"] and pruned["choice"]["taken"]
    path = [*state.facts.get("path", []), {"after_step": step, "keep": pruned["keep"], "blend": blend}]
    seconds = {part: before.get(part, 0.0) + spent for part, spent in facts["part_seconds"].items()}
    return cut.masks, {**facts, "path": path, "part_seconds": seconds}


PIPELINE = Pipeline(
    description="train, then for each level train again and prune gradually",
    compared_with="the network just before the last of its cuts, in the middle of its training",
    metric="delta_top1",
    parent=lambda stage: stage.dense,
    prepare=prepare,
    mask_changes=mask_changes,
)
