"""The two pipelines of the paper, at opposite ends of how much training pruning may cost.

    iterative   train once; then, level by level: keep alpha of what is left, retrain with the whole schedule
    at-init     initialise; for each level of the same ladder: prune the initial network once, train

All methods of one seed share its trained parent (iterative) or its initial network (at-init). A record speaks of one
network: the bound in it is about the moment before retraining, against the network that was pruned.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sipp.certificates.claims import certify, to_json
from sipp.errors import DataError, ModelError
from sipp.experiments.nets import build
from sipp.experiments.parallel.processes import from_leader, rank_together
from sipp.experiments.recipes import Recipe
from sipp.experiments.runs.stages import Network, Prepared, Work, finished, module_of, run_stage
from sipp.experiments.runs.store import Store
from sipp.experiments.training.feed import plain_batches
from sipp.experiments.training.loop import Accuracy, EpochRow, evaluate
from sipp.options import Scoring
from sipp.pruning.entry import cut, rank
from sipp.pruning.result import Pruned, Ranking
from sipp.records import to_rows
from sipp.scoring.methods import Method, method_of
from sipp.storage.files import Values

# Methods that choose by score alone; sampling methods (T8) never draw what has no sensitivity.

# Of the certificates in a record (T14): the delta of a recipe is that of the theory, far below what a holdout can show.
CERTIFICATE_DELTA = 0.05
CERTIFICATE_CONFIDENCE = 0.95

# Scores are counted in half decades from 1e-9 to 1e3; what lies outside counts in the first or last bin.
SCORE_BINS = {"low": -9.0, "width": 0.5, "n": 24}

InitialRanking = Callable[[int, Method], Ranking]


@dataclass(frozen=True)
class Unit:
    """One network of a run: level 0 is the dense one, which has no method."""

    seed: int
    method: Method | None
    level: int

    @property
    def stage(self) -> str:
        return f"seed{self.seed}.dense" if self.method is None else f"seed{self.seed}.{self.method}.{self.level:02d}"


MakeUnit = Callable[[Unit], None]


def plan(recipe: Recipe) -> list[Unit]:
    """All networks of a run, in the order in which they are made."""
    return units_of(recipe.seeds, recipe.prune.methods, recipe.prune.levels)


def units_of(seeds: Sequence[int], methods: Sequence[Method], levels: int) -> list[Unit]:
    """The networks of these seeds, methods and levels, in the order in which they are made."""
    units = []
    for seed in seeds:
        units.append(Unit(seed, None, 0))
        for method in methods:
            units += [Unit(seed, method, level) for level in range(1, levels + 1)]
    return units


def needs(recipe: Recipe, unit: Unit) -> Unit | None:
    """The unit whose network this one is pruned from; None where that is an initial network, which is made anew."""
    if recipe.pipeline == "at-init" or unit.method is None:
        return None
    return Unit(unit.seed, unit.method if unit.level > 1 else None, unit.level - 1)


def unit_maker(recipe: Recipe, store: Store, work: Work) -> MakeUnit:
    """A function that makes one unit; what it needs must have been made."""

    @lru_cache(maxsize=1)  # at-init: one ranking serves all levels of a method
    def ranking(seed: int, method: Method) -> Ranking:
        return _rank(recipe, work, Unit(seed, method, 0), _initial(recipe, work, seed))

    return lambda unit: _run_unit(recipe, store, work, unit, ranking)


def run_units(recipe: Recipe, store: Store, work: Work) -> Generator[Unit, None, None]:
    """Each unit that had to be made, once it is done; those done before are only looked at."""
    make = unit_maker(recipe, store, work)
    for unit in plan(recipe):
        if finished(work.team, store.stage(unit.stage)) is None:
            make(unit)
            yield unit


def _run_unit(recipe: Recipe, store: Store, work: Work, unit: Unit, ranking: InitialRanking) -> None:
    def prepare() -> Prepared:
        if unit.method is None:
            return Prepared(_initial(recipe, work, unit.seed), {})
        began = time.monotonic()
        if recipe.pipeline == "at-init":
            initial = ranking(unit.seed, unit.method)  # the first level of a method scores for all of them
            scored_in = time.monotonic() - began
            budget = initial.n_weights
            for _ in range(unit.level):
                budget = next_budget(budget, recipe.prune.alpha)
            return from_leader(work.team, lambda: _pruned(work, unit, initial, {}, budget, scored_in))
        above = needs(recipe, unit)
        assert above is not None
        parent = finished(work.team, store.stage(above.stage))
        if parent is None:  # damaged since it was made
            _run_unit(recipe, store, work, above, ranking)
            parent = finished(work.team, store.stage(above.stage))
            assert parent is not None
        began = time.monotonic()
        own = _rank(recipe, work, unit, parent)
        scored_in = time.monotonic() - began
        left = sum(int(mask.sum()) for mask in parent.masks.values()) if parent.masks else own.n_weights
        budget = next_budget(left, recipe.prune.alpha)
        return from_leader(work.team, lambda: _pruned(work, unit, own, parent.masks, budget, scored_in))

    def describe(network: Network, facts: Values, rows: tuple[EpochRow, ...]) -> Values:
        head = {
            "kind": "dense" if unit.method is None else "level",
            "recipe": recipe.name,
            "pipeline": recipe.pipeline,
            "net": recipe.net,
            "data": recipe.data.name,
            "seed": unit.seed,
            "method": unit.method,
            "level": unit.level,
        }
        final = rows[-1].test
        assert final is not None
        found = {**head, **facts, "after": accuracy_values(final), "train_loss": rows[-1].train_loss}
        for layer in found.get("layers", []):
            layer["nnz"] = int(torch.count_nonzero(network.state[layer["name"]]))
        return found

    run_stage(work, store.stage(unit.stage), seed=unit.seed, prepare=prepare, describe=describe)


def next_budget(left: int, alpha: float) -> int:
    """The number of weights of the next level: alpha of what is left, at least one (alpha is the share KEPT)."""
    return max(1, round(alpha * left))


def _initial(recipe: Recipe, work: Work, seed: int) -> Network:
    """The initial network of a seed, the same for every method and level."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(recipe.net, n_classes=work.feed.n_classes)
    return Network({key: tensor.detach().clone() for key, tensor in model.state_dict().items()}, {})


def _rank(recipe: Recipe, work: Work, unit: Unit, parent: Network) -> Ranking:
    """The scores of all weights by the unit's method, on all calibration points."""
    method, feed = unit.method, work.feed
    assert method is not None
    model = module_of(work, parent)

    def rank_batches(batches: list[Any]) -> Ranking:
        return rank(
            model,
            batches,
            method=method,
            delta=recipe.prune.delta,
            seed=prune_seed(unit.seed, method, unit.level),
            draws=recipe.prune.draws,
            reduce=recipe.prune.reduce,
            # An untrained network has no running statistics worth the name.
            scoring=Scoring(norm_stats="batch" if recipe.pipeline == "at-init" else "running"),
        )

    batches = list(plain_batches(feed, feed.splits.calibration, batch_size=recipe.prune.batch_size))
    return rank_together(work.team, rank_batches, batches)


def prune_seed(seed: int, method: str, level: int) -> int:
    """The seed of one pruning step."""
    return int.from_bytes(hashlib.sha256(f"prune {seed} {method} {level}".encode()).digest()[:8], "big") >> 1


def _pruned(
    work: Work, unit: Unit, ranking: Ranking, alive: Mapping[str, Tensor], budget: int, scored_in: float
) -> Prepared:
    """The network cut to `budget` weights out of those alive (all, if no masks are given), and what is known of it."""
    assert unit.method is not None
    began = time.monotonic()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*died, n")  # dead rows are in the record
        pruned = cut(only_alive(ranking, alive), budget, seed=prune_seed(unit.seed, unit.method, unit.level))
    masks = {name: mask.cpu() for name, mask in pruned.masks.items()}
    # A weight that is alive but exactly zero ties with dead ones; the dead stay dead, and the record's count is exact.
    masks = {name: mask & alive[name] if alive else mask for name, mask in masks.items()}
    state = {key: tensor.detach().cpu().clone() for key, tensor in pruned.model.state_dict().items()}
    before = evaluate(pruned.model, work.feed, work.feed.splits.test, precision=work.hyper.precision)
    facts = _facts(ranking, pruned, masks, before)
    for weight, scores_FK, layer in zip(ranking.weights, ranking.ranks, facts["layers"]):
        layer["scores"] = _score_counts(scores_FK, to_rows(weight, masks[weight.name]))
    pruned_in = time.monotonic() - began
    facts["certificate"] = _certificate(work, ranking, pruned)
    certified_in = time.monotonic() - began - pruned_in
    facts["part_seconds"] = {"score": scored_in, "prune": pruned_in, "certify": certified_in}
    return Prepared(Network(state, masks), facts)


def _score_counts(scores_FK: Tensor, mask_FK: Tensor) -> Values:
    """How many of a weight's scores, and of those it keeps, fall into each of `SCORE_BINS`; zeros are apart."""
    low, width, n = SCORE_BINS["low"], SCORE_BINS["width"], int(SCORE_BINS["n"])
    scores = scores_FK.double().flatten()
    kept = mask_FK.to(scores.device).flatten()
    positive = scores > 0
    # A bin holds its upper edge, so that a sensitivity of 1 counts below 1.
    bins = (((scores[positive].log10() - low) / width).ceil() - 1).clamp(0, n - 1).long()
    return {
        "zero": int((~positive).sum()),
        "counts": torch.bincount(bins, minlength=n).tolist(),
        "kept": torch.bincount(bins[kept[positive]], minlength=n).tolist(),
    }


def _certificate(work: Work, ranking: Ranking, pruned: Pruned) -> Values | None:
    """What the holdout says of the pruned network before retraining (T14), or why nothing; None without a holdout.

    No ledger: every network of a run is certified on the same points, and each claim stands for itself alone.
    """
    splits = work.feed.splits
    if not len(splits.holdout):
        return None
    try:
        found = certify(
            ranking.model,
            pruned.model,
            plain_batches(work.feed, splits.holdout),
            delta=CERTIFICATE_DELTA,
            confidence=CERTIFICATE_CONFIDENCE,
            calibration=plain_batches(work.feed, splits.calibration),
        )
    except (DataError, ModelError) as error:  # such as copies of one image in both parts: no claim, but no stop either
        return {"verdict": f"refused: {error}"}
    values: Values = json.loads(to_json(found))
    return values


def only_alive(ranking: Ranking, alive: Mapping[str, Tensor]) -> Ranking:
    """The ranking with the scores of pruned weights at 0 and, where scores alone decide, all others above 0.

    Without this, a budget above the number of positive scores would be filled up with pruned weights, in their order;
    and `random` would rank them like any other.
    """
    if not alive:
        return ranking
    ranks = []
    for weight, scores_FK in zip(ranking.weights, ranking.ranks):
        alive_FK = to_rows(weight, alive[weight.name]).to(scores_FK.device)
        # The smallest normal number: it decides ties only, and can only add to a bound (T5), never lower it.
        least = torch.finfo(scores_FK.dtype).tiny if not method_of(ranking.method).is_sampled else 0.0
        ranks.append(torch.where(alive_FK, scores_FK.clamp(min=least), 0.0))
    return replace(ranking, ranks=tuple(ranks), is_thinned=True)


def _facts(ranking: Ranking, pruned: Pruned, masks: Mapping[str, Tensor], before: Accuracy) -> Values:
    """All that is known of a pruned network before it is retrained."""
    layers: list[dict[str, Any]] = []
    for weight, layer in zip(ranking.weights, pruned.layers):
        mask_FK = to_rows(weight, masks[weight.name])
        layers.append(
            {
                "name": weight.name,
                "n_weights": weight.n_weights,
                "kept": int(mask_FK.sum()),
                "dead_rows": int((~mask_FK.any(1)).sum()),
                "strategies": layer.strategies,
                "eps": _finite(layer.eps),
            }
        )
    kept = sum(layer["kept"] for layer in layers)
    return {
        "n_weights": ranking.n_weights,
        "budget": pruned.budget,
        "kept": kept,
        "keep": kept / ranking.n_weights,
        "before": accuracy_values(before),
        "bound": {
            "epsilon": _finite(pruned.bound.epsilon),
            "delta": pruned.bound.delta,
            "met": pruned.bound.met,
            "reason": pruned.bound.reason or ("epsilon is infinite" if _finite(pruned.bound.epsilon) is None else ""),
            "speaks_of": "the network before retraining, against the network it was pruned from",
        },
        "guarantee": None if pruned.guarantee is None else str(pruned.guarantee),
        "dead_rows": sum(layer["dead_rows"] for layer in layers),
        "score_bins": dict(SCORE_BINS),
        "layers": layers,
    }


def accuracy_values(accuracy: Accuracy) -> Values:
    """The accuracy as it stands in a record."""
    return {
        "n": accuracy.n,
        "top1": accuracy.top1,
        "top5": accuracy.top5,
        "loss": _finite(accuracy.loss),
    }


def _finite(value: float | None) -> float | None:
    """The number, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None
