"""What pipelines share: scoring a network, pruning it to a budget, and recording the result.

The bound in a record compares the network just after pruning with the network it was pruned from. No statement covers
retraining.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from sipp.errors import DataError, ModelError
from sipp.files import Values
from sipp.native.compiling import compiling_seconds
from sipp.pruning.cutting import cut
from sipp.pruning.ranking import masks_within, only_alive, rank
from sipp.repairing.data_split import split_data
from sipp.repairing.repair_network import repaired_cut
from sipp.repairing.repair_options import RepairOptions
from sipp.results.jsonio import to_json
from sipp.results.options import NormStats, PruneOptions, Scoring, repairs_asked
from sipp.results.pruned import Pruned, PrunedFacts
from sipp.results.ranking import Ranking, to_rows
from sipp.scoring.task import task_of
from sipp.verbs.certify import certify
from sipp.verbs.prune import pruned_of
from sipp_lab.arms import arm_of
from sipp_lab.parallel.processes import from_leader, in_every_process
from sipp_lab.runs.context import Network, Prepared, RunContext, module_of
from sipp_lab.runs.plan import Stage
from sipp_lab.seeds import prune_seed
from sipp_lab.training.feed import eval_batches
from sipp_lab.training.loop import evaluate

# Of the certificates in a record (T14).
CERTIFICATE_SHARE = 0.05
CERTIFICATE_CONFIDENCE = 0.95


def clock() -> float:
    """Seconds without compilation, which happens only once after an install."""
    return time.monotonic() - compiling_seconds()


def next_budget(left: int, alpha: float) -> int:
    """The budget of the next level: the share alpha of the weights left, at least one."""
    return max(1, round(alpha * left))


def level_budget(context: RunContext, stage: Stage, n_weights: int) -> int:
    """The budget of a stage's level: its keep times `n_weights`, or alpha applied level by level."""
    spec, budget = context.recipe.prune, n_weights
    if spec.alpha is None:
        return max(1, round(spec.keep_at(stage.level) * n_weights))
    for _ in range(stage.level):
        budget = next_budget(budget, spec.alpha)
    return budget


def rank_for(context: RunContext, stage: Stage, network: Network, *, norm_stats: NormStats) -> Ranking:
    """Scores all weights of a network with the stage's method, on all calibration points."""
    feed, spec = context.feed, context.recipe.prune
    assert stage.method is not None
    arm, seed = arm_of(stage.method), prune_seed(stage.seed, stage.method, stage.level)
    options = PruneOptions(
        method=arm.method,
        delta=spec.delta,
        draws=spec.draws,
        allocation=spec.allocation,
        reduce=arm.reduce or spec.reduce,
        c_constant=spec.c_constant,
        k_constant=spec.k_constant,
    )
    model = module_of(context, network)
    batches = list(eval_batches(feed, feed.splits.calibration, batch_size=spec.batch_size))

    def score() -> Ranking:
        return rank(task_of(model, batches, scoring=Scoring(norm_stats=norm_stats), seed=seed), options)

    return in_every_process(context.processes, score)  # each scores all points: the same bits


def cut_to(
    context: RunContext, stage: Stage, ranking: Ranking, alive: Mapping[str, Tensor], budget: int, scored_in: float
) -> Prepared:
    """Prunes to `budget` of the weights still alive (all, without masks); the same result in all processes.

    Returns it with everything to record before training; `scored_in` is the time of scoring in seconds.
    """
    return from_leader(context.processes, lambda: _cut(context, stage, ranking, alive, budget, scored_in))


def _cut(
    context: RunContext, stage: Stage, ranking: Ranking, alive: Mapping[str, Tensor], budget: int, scored_in: float
) -> Prepared:
    assert stage.method is not None
    began = clock()
    left = only_alive(ranking, alive)
    seed, repair, repaired = prune_seed(stage.seed, stage.method, stage.level), context.recipe.prune.repair, None
    sparse = cut(left, budget, seed=seed)
    if repair:  # weights that are 0 stay 0, so pruned weights stay pruned
        points = list(eval_batches(context.feed, context.feed.splits.calibration))
        split = split_data(ranking.model, points, seed=seed)
        repair_options = RepairOptions(seed=seed)
        sparse, repaired = repaired_cut(left, sparse, sparse.model, split, repairs_asked(repair), repair_options)
    pruned = pruned_of(left, sparse, repaired=repaired)
    # alive weights that are exactly 0 tie with pruned ones: without those, the record's count is exact
    masks = masks_within({name: mask.cpu() for name, mask in pruned.masks.items()}, alive)
    state = {key: tensor.detach().cpu().clone() for key, tensor in pruned.model.state_dict().items()}
    before = evaluate(pruned.model, context.feed, context.feed.splits.test, precision=context.recipe.train.precision)
    pruned_in = clock() - began
    facts: Values = {"pruned": _within(ranking, pruned, masks), "before": before}
    facts |= _certificate(context, ranking, pruned)
    certified_in = clock() - began - pruned_in
    facts["part_seconds"] = {"score": scored_in, "prune": pruned_in, "certify": certified_in}
    return Prepared(Network(state, masks), to_json(facts))


def _certificate(context: RunContext, ranking: Ranking, pruned: Pruned) -> Values:
    """The certificate of the pruned network before retraining (T14), or why it was refused; empty without a holdout.

    All networks of a run are certified on the same points, and each claim holds on its own.
    """
    splits = context.feed.splits
    if not len(splits.holdout):
        return {}
    try:
        certificate = certify(
            ranking.model,
            pruned.model,
            eval_batches(context.feed, splits.holdout),
            share=CERTIFICATE_SHARE,
            confidence=CERTIFICATE_CONFIDENCE,
            calibration=eval_batches(context.feed, splits.calibration),
            progress=False,  # a run has its own display
        )
    except (DataError, ModelError) as error:  # such as duplicates in both parts: no certificate, but the run goes on
        return {"why_no_certificate": f"refused: {error}"}
    return {"certificate": certificate}


def _within(ranking: Ranking, pruned: Pruned, masks: Mapping[str, Tensor]) -> PrunedFacts:
    """What is known about a pruned network before it is retrained, with the counts of these masks.

    Every row without a weight counts as dead, also one that an earlier level or an earlier tool emptied.
    """
    layers = []
    for weight, layer in zip(ranking.weights, pruned.layers):
        mask_FK = to_rows(weight, masks[weight.name])
        layers.append(replace(layer, kept=int(mask_FK.sum()), dead_rows=int((~mask_FK.any(1)).sum())))
    kept = sum(layer.kept for layer in layers)
    return replace(pruned, layers=tuple(layers), kept=kept, seen=frozenset(), seen_all=False)
