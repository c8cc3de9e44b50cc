"""What pipelines share: `sipp.prune` a network to the budget of a level, and all that its record says about it.

The bound in a record compares the network just after pruning with the network it was pruned from. No statement covers
retraining.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import sipp
from sipp.errors import DataError, DeadRowsWarning, ModelError
from sipp.results import NormStats, SeenInputs, to_json
from sipp_lab.arms import arm_of
from sipp_lab.parallel.processes import from_leader
from sipp_lab.runs.context import Network, Prepared, RunContext
from sipp_lab.runs.records import Stage
from sipp_lab.seeds import prune_seed
from sipp_lab.training.feed import eval_batches
from sipp_lab.training.loop import evaluate

# Of the certificates in a record (T14).
CERTIFICATE_SHARE = 0.05
CERTIFICATE_CONFIDENCE = 0.95
SCORING_BATCH = 128  # calibration inputs per forward pass


def n_prunable(context: RunContext, network: Network) -> int:
    """How many weights `sipp.prune` chooses among."""
    if network.masks:
        return sum(mask.numel() for mask in network.masks.values())
    model = context.module_of(network, context.recipe.train)
    return sipp.prune(model, None, keep=1.0, method="magnitude", progress=False).n_weights


def level_budget(context: RunContext, stage: Stage, network: Network) -> int:
    """The budget of a stage's level, at most what is left: its keep of all weights, or alpha applied level by level."""
    spec, budget = context.recipe.prune, n_prunable(context, network)
    left = sum(int(mask.sum()) for mask in network.masks.values()) if network.masks else budget
    if spec.alpha is None:
        return min(left, max(1, round(spec.keep_at(stage.level) * budget)))
    for _ in range(stage.level):
        budget = max(1, round(spec.alpha * budget))
    return min(left, budget)


def cut_to(
    context: RunContext, stage: Stage, network: Network, budget: int, *, norm_stats: NormStats = "running"
) -> Prepared:
    """The network pruned to `budget` of the weights that are left, by the stage's method on all calibration inputs.

    It comes with everything to record before training, and is the same in all processes.
    """
    return from_leader(context.processes, lambda: _cut(context, stage, network, budget, norm_stats))


def _cut(context: RunContext, stage: Stage, network: Network, budget: int, norm_stats: NormStats) -> Prepared:
    assert stage.method is not None
    feed, spec, arm = context.feed, context.recipe.prune, arm_of(stage.method)
    points = list(eval_batches(feed, feed.splits.calibration, batch_size=SCORING_BATCH))
    hyper = context.recipe.hyper_of(stage.method)
    model, began = context.module_of(network, hyper), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeadRowsWarning)  # the record counts them
        pruned = sipp.prune(
            model,
            points,
            budget=budget,
            method=arm.method,
            seed=prune_seed(stage.seed, stage.method, stage.level),
            within=network.masks or None,
            statements=False,  # for other methods, they take longer than the pruning
            norm_stats=norm_stats,
            progress=False,  # a run has its own display
            **{**spec.of_prune, "reduce": arm.reduce or spec.reduce},
        )
    pruned_in = time.monotonic() - began
    before = evaluate(pruned.model, feed, feed.splits.test, precision=hyper.precision)
    began = time.monotonic()
    facts: dict[str, Any] = {"pruned": replace(pruned, seen=SeenInputs(frozenset(), is_all=False)), "before": before}
    facts |= _certificate(context, model, pruned.model)
    facts["part_seconds"] = {"prune": pruned_in, "certify": time.monotonic() - began}
    return Network.of(pruned.model, pruned.masks), to_json(facts)


def _certificate(context: RunContext, dense: Any, pruned: Any) -> dict[str, Any]:
    """The certificate of the pruned network before retraining (T14), or why it was refused; empty without a holdout.

    All networks of a run are certified on the same points, and each claim holds on its own.
    """
    splits = context.feed.splits
    if not len(splits.holdout):
        return {}
    try:
        certificate = sipp.certify(
            dense,
            pruned,
            eval_batches(context.feed, splits.holdout),
            share=CERTIFICATE_SHARE,
            confidence=CERTIFICATE_CONFIDENCE,
            calibration=eval_batches(context.feed, splits.calibration),
            progress=False,
        )
    except (DataError, ModelError) as error:  # such as duplicates in both parts: no certificate, but the run goes on
        return {"why_no_certificate": f"refused: {error}"}
    return {"certificate": certificate}
