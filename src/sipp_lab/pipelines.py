"""Pipelines: in which order networks are pruned and trained. The table is at the end.

`sipp_lab.runs` does the rest (folders, checkpoints, records, several processes, Ray). The bound and the certificate in
a record compare the network just after pruning with the network it was pruned from. No statement covers retraining.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

import sipp
from sipp.errors import DataError, DeadRowsWarning, ModelError
from sipp.results import NormStats, SeenInputs, budget_at, cut_times, to_json
from sipp_lab.processes import from_leader
from sipp_lab.recipes.arms import arm_of
from sipp_lab.recipes.table import WORDS
from sipp_lab.runs.context import Network, RunContext
from sipp_lab.runs.records import Stage
from sipp_lab.seeds import prune_seed
from sipp_lab.training import AfterStep, TrainState, evaluate, set_masks

Prepared = tuple[Network, dict[str, Any]]  # the network that training starts from, and what to record about it

# Of the certificates in a record (T14).
CERTIFICATE_SHARE = 0.05
CERTIFICATE_CONFIDENCE = 0.95
SCORING_BATCH = 128  # calibration inputs per forward pass


@dataclass(frozen=True)
class Pipeline:
    """Which network a stage starts from, how it is pruned, and whether it is pruned further during training."""

    description: str
    compared_with: str  # what bounds and certificates compare a pruned network with
    metric: Literal["top1", "delta_top1"]  # of the plot shown first: accuracy, or its change
    # The network that training starts from, out of the parent's (of the initial one if there is no parent).
    prepare: Callable[[RunContext, Stage, Network], Prepared]
    # The stage whose trained network is the parent; None: pruned networks start from the initial one.
    parent: Callable[[Stage], Stage] | None = None
    # What is done after each step of a training of n steps; None: the masks of `prepare` stay.
    after_step: Callable[[RunContext, Stage, int], AfterStep] | None = None

    def parent_of(self, stage: Stage) -> Stage | None:
        """The stage whose trained network this one is pruned from; None if there is none."""
        return None if self.parent is None or stage.method is None else self.parent(stage)


# --- pruning to a level -----------------------------------------------------------------------------------------------


def cut_to_level(context: RunContext, stage: Stage, network: Network, *, norm_stats: NormStats = "running") -> Prepared:
    """The network pruned to the budget of this level."""
    return _cut_to(context, stage, network, _level_budget(context, stage, network), norm_stats)


def _n_prunable(context: RunContext, network: Network) -> int:
    """How many weights `sipp.prune` chooses among."""
    if network.masks:
        return sum(mask.numel() for mask in network.masks.values())
    model = context.module_of(network, context.recipe.train)
    return sipp.prune(model, None, keep=1.0, method="magnitude", progress=False).n_weights


def _level_budget(context: RunContext, stage: Stage, network: Network) -> int:
    """The budget of a stage's level, at most what is left: its keep of all weights, or alpha applied level by level."""
    spec, budget = context.recipe.prune, _n_prunable(context, network)
    left = sum(int(mask.sum()) for mask in network.masks.values()) if network.masks else budget
    if spec.alpha is None:
        return min(left, max(1, round(spec.keep_at(stage.level) * budget)))
    for _ in range(stage.level):
        budget = max(1, round(spec.alpha * budget))
    return min(left, budget)


def _cut_to(
    context: RunContext, stage: Stage, network: Network, budget: int, norm_stats: NormStats = "running"
) -> Prepared:
    """The network pruned to `budget` of the weights that are left, by the stage's method on all calibration inputs.

    It comes with everything to record before training, and is the same in all processes.
    """
    return from_leader(lambda: _pruned_by_leader(context, stage, network, budget, norm_stats))


def _pruned_by_leader(
    context: RunContext, stage: Stage, network: Network, budget: int, norm_stats: NormStats
) -> Prepared:
    assert stage.method is not None
    feed, (method, reduce) = context.feed, arm_of(stage.method)
    hyper = context.recipe.hyper_of(stage.method)
    model = context.module_of(network, hyper)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeadRowsWarning)  # the record counts them
        pruned = sipp.prune(
            model,
            list(feed.eval_batches(feed.splits.calibration, batch_size=SCORING_BATCH)),
            budget=budget,
            method=method,
            seed=prune_seed(stage.seed, stage.method, stage.level),
            within=network.masks or None,
            statements=False,  # for other methods, they take longer than the pruning
            norm_stats=norm_stats,
            progress=False,  # a run has its own display
            reduce=reduce,
            **context.recipe.prune.of_prune,
        )
    facts = {
        "pruned": replace(pruned, seen=SeenInputs()),
        "before": evaluate(pruned.model, feed, feed.splits.test, precision=hyper.precision),
        **_certificate(context, model, pruned.model),
    }
    return Network.of(pruned.model, pruned.masks), to_json(facts)


def _certificate(context: RunContext, dense: nn.Module, pruned: nn.Module) -> dict[str, Any]:
    """The certificate of the pruned network before retraining (T14), or why it was refused; empty without a holdout.

    All networks of a run are certified on the same points, and each claim holds on its own.
    """
    feed, splits = context.feed, context.feed.splits
    if not len(splits.holdout):
        return {}
    try:
        certificate = sipp.certify(
            dense,
            pruned,
            feed.eval_batches(splits.holdout),
            share=CERTIFICATE_SHARE,
            confidence=CERTIFICATE_CONFIDENCE,
            calibration=feed.eval_batches(splits.calibration),
            progress=False,
        )
    except (DataError, ModelError) as error:  # such as duplicates in both parts: no certificate, but the run goes on
        return {"why_no_certificate": f"refused: {error}"}
    return {"certificate": certificate}


# --- iterative --------------------------------------------------------------------------------------------------------


def previous_level(stage: Stage) -> Stage:
    """The stage of the previous level; the dense stage for the first level."""
    return Stage(stage.seed, stage.method, stage.level - 1) if stage.level > 1 else stage.dense


# --- gradual ----------------------------------------------------------------------------------------------------------


def gradual_cuts(context: RunContext, stage: Stage, n_steps: int) -> AfterStep:
    """Prunes further during training, when and to the share that `sipp.results.gradual` says.

    Levels do not depend on each other: each is trained for two full schedules, whatever it keeps.
    """
    times = cut_times(n_steps)

    def cut(n_done: int, state: TrainState) -> None:
        if n_done not in times:
            return
        current = Network.of(state.model, state.masks)
        budget = budget_at(times[n_done], _n_prunable(context, current), _level_budget(context, stage, current))
        network, facts = _cut_to(context, stage, current, budget)
        # The leader's network, with its BatchNorm statistics; sampling rescales the weights it keeps (T8).
        state.model.load_state_dict(network.state)
        set_masks(state, network.masks)
        pruned = facts["pruned"]
        blend = pruned["choice"] and pruned["choice"]["taken"]
        path = [*state.facts.get("path", []), {"after_step": n_done, "keep": pruned["keep"], "blend": blend}]
        state.facts = {**state.facts, **facts, "path": path}

    return cut


PIPELINES: dict[str, Pipeline] = {
    "iterative": Pipeline(
        description=WORDS["iterative"],
        compared_with="the network it was pruned from",
        metric="delta_top1",
        parent=previous_level,
        prepare=cut_to_level,
    ),
    "at-init": Pipeline(
        description=WORDS["at-init"],
        compared_with="the initial network, untrained like the pruned one",
        metric="top1",
        prepare=partial(cut_to_level, norm_stats="batch"),  # its running statistics say nothing yet
    ),
    "gradual": Pipeline(
        description=WORDS["gradual"],
        compared_with="the network just before the last of its cuts, in the middle of its training",
        metric="delta_top1",
        parent=lambda stage: stage.dense,
        prepare=lambda context, stage, network: (network, {}),
        after_step=gradual_cuts,
    ),
}
