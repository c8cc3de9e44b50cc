"""Computes what is guaranteed for the rows, layers and output of a cut network (T4, T11, T12, T17-T19).

T11  ||Z^ - Z|| <= eps_l Delta_l ||Z||,    eps_l = max over the layer's rows of eps_i
T12  ||f^(x) - f(x)|| <= eps ||f(x)||,     eps = sum_l c_l max over S of Q_l(x) / ||f(x)||,
     c_l = (prod_{k > l} Lip_k) eps_l,  Q_l = ||Z_l^{++}|| + ||Z_l^{+-}|| + ||Z_l^{-+}|| + ||Z_l^{--}||
The paper takes the maxima of Delta_l and of kappa_l separately, which is never smaller. Mode "paper" uses Lip_k =
||W_k||_F as the paper does. That bounds a chain of fully-connected layers with 1-Lipschitz activations. It is no bound
for convolutions, residual connections or norms (docs/theory.md, last section, 6 and 7); the record says so.

T18  A maximum over n distinct points bounds the value at a new input for all but a share of inputs, at a confidence.
     This needs functions that were fixed before the points were seen. Q_l / ||f|| are; eps(x) is not, because the
     pruning chose its coefficients.
T19  With a holdout C is measured there, instead of assumed.

Pruned, user-masked and repaired networks are treated alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sipp.inputs import AnyData
from sipp.pruning import Cut, Ranking
from sipp.results import (
    Coverage,
    Guarantee,
    Measured,
    Mode,
    NetworkBound,
    PrunedLayer,
    check,
    numerics,
    words,
)
from sipp.scoring import (
    ScoringTask,
    Sensitivities,
    measure_sensitivities,
    method_of,
)

# The factor c of T4: how many events share the failure probability.
PRUNE_FACTOR = 8
SIMPLE_FACTOR = 16
NETWORK_FACTOR = 6

LEAST_OF_ROW = 1e-3  # share of the row's largest sensitivity: the least that a weight counts in T19
# A float32 ratio is one product over a sum of K of them: K - 1 additions, and a few roundings of the weight, the
# activation, their product, the reciprocal and the product with it, each by at most a unit. Two such ratios are
# compared, so the relative difference that rounding alone can make is below 2 (K + 8) units. Tensor cores cut sums off
# instead of rounding them, so a unit is that of cutting off.
FLOAT32_UNIT = 2.0**-23
FEW_ROUNDINGS = 8

CONTRADICTED = "the data contradicts the theory's assumption"  # the statement about rows says by what


@dataclass(frozen=True)
class Statements:
    """The guarantees of a cut network, and the record of each layer."""

    guarantee: Guarantee | None
    bound: NetworkBound
    measured: Measured | None
    layers: tuple[PrunedLayer, ...]


def statements_of(
    ranking: Ranking,
    cut: Cut,
    task: ScoringTask | None = None,
    new_points: AnyData | None = None,
    mode: Mode = "paper",
) -> Statements:
    """Computes the guarantees of a cut, and the record of each layer.

    `new_points` are inputs that the pruning has not seen. With mode "paper" they measure C (T19) and make the network
    bound smaller (T18); their norms are computed with the options of `task`. Mode "sound" bounds the network on them
    (T13).
    """
    scores, holdout = ranking.sensitivities, None
    no_eps: list[float | None] = [None] * len(cut.rows)
    if scores is None:
        bound = NetworkBound.none(ranking.why_no_sensitivities, ranking.options.delta)
        return Statements(None, bound, None, _layer_records(ranking, cut, {}, no_eps))
    if mode == "paper" and new_points is not None and task is not None:
        holdout = measure_sensitivities(replace(task.with_points(new_points), seed=0))
    left_out = words.listed(cut.others) if cut.others else ""
    obstacle, reasons = _obstacle(scores, cut), _why_rows_have_no_bound(ranking, cut)
    guarantee = row_guarantee(ranking, scores, ranking.dense, factor_of(ranking.method_name), reasons)
    eps = [float(row.eps_F.max()) for row in cut.rows]
    epsilon, kappas = network_epsilon(scores, eps, lipschitz_of(ranking.dense, cut), holdout)
    if mode == "sound" and new_points is not None:
        from sipp.bounds.sound import sound_network_bound  # loaded only if asked for

        confidence = ranking.options.confidence
        bound = sound_network_bound(ranking.model, cut.model, new_points, scores, confidence=confidence)
    else:
        bound = paper_bound(ranking, scores, cut, epsilon, obstacle=obstacle, reasons=reasons, holdout=holdout)
    measured, eps_measured = None, no_eps
    if holdout is not None:
        measured, eps_measured = _measured(ranking, scores, cut, obstacle, holdout)
        measured = replace(measured, left_out=left_out)
    layers = _layer_records(ranking, cut, kappas, eps_measured)
    return Statements(replace(guarantee, left_out=left_out), bound, measured, layers)


def _why_rows_have_no_bound(ranking: Ranking, cut: Cut) -> list[str]:
    reasons = []
    if _is_sampled(cut) and ranking.options.draws == "until":
        reasons.append(
            "draws='until' makes the number of draws depend on the draws, but bounds are proved for draws='fixed' only"
        )
    n_unknown = sum(int(row.eps_F.isinf().sum()) for row in cut.rows)
    if n_unknown:
        rows_have = "row has" if n_unknown == 1 else "rows have"
        reasons.append(f"{n_unknown} {rows_have} a weight that was 0 and no longer is, so there is no bound")
    return reasons


def _is_sampled(cut: Cut) -> bool:
    return any(row.is_sampled for row in cut.rows)


def _obstacle(scores: Sensitivities, cut: Cut) -> str:
    """Why T12 does not apply to the model; empty if it does."""
    return f"{cut.others[0]} changed too, and is not a pruned weight" if cut.others else scores.map.no_chain


def _measured(
    ranking: Ranking, scores: Sensitivities, cut: Cut, obstacle: str, holdout: Sensitivities
) -> tuple[Measured, list[float | None]]:
    """The measured constant (T19) with its bounds for layers and network, and eps of each layer (T17).

    A sampled row is bounded by its actual values (T17), because T6 is proved for T4's C only.
    """
    measured = measure_constant(scores, holdout, ranking.options.confidence)
    if measured.c_constant is None:
        return measured, [None] * len(cut.rows)
    eps = [
        float(row.eps_by_values(dense_FK, s_FK, c_constant=measured.c_constant).max())
        for row, dense_FK, s_FK in zip(
            cut.rows, ranking.dense, (floored(one.sensitivity_FK.cpu()) for one in scores.layers)
        )
    ]
    share = min(1.0, measured.share + network_coverage(scores, measured.confidence, holdout).share)
    epsilon, _ = network_epsilon(scores, eps, lipschitz_of(ranking.dense, cut), holdout)
    reason = ""
    if obstacle:
        reason = f"the paper's formula does not apply: {obstacle}"
    elif epsilon is None or math.isinf(epsilon):
        reason = "a norm is unknown, or epsilon is infinite"
    elif share > Coverage.MOST_SHARE:
        reason = "too few inputs for two maxima"
    measured = replace(
        measured,
        layers_share=min(1.0, measured.share + Coverage.of(scores.n_distinct, 1, measured.confidence).share),
        epsilon=None if reason else epsilon,
        network_share=1.0 if reason else share,
        network_reason=reason,
    )
    return measured, [value if math.isfinite(value) else None for value in eps]


def _layer_records(
    ranking: Ranking, cut: Cut, kappas: Mapping[str, float], eps_measured: Sequence[float | None]
) -> tuple[PrunedLayer, ...]:
    scores = ranking.sensitivities
    has_bound = scores is not None and scores.reduce == "max"
    info = method_of(ranking.options.method)
    has_strategies = info.uses_sensitivities and not info.is_blend
    records = []
    for i, (weight, rows, dense_FK) in enumerate(zip(ranking.weights, cut.rows, ranking.dense)):
        complexity = scores.layers[i].sign_complexity if scores is not None else None
        eps = float(rows.eps_F.max()) if has_bound else None
        # within the masks of an earlier pruning, every row without a weight is dead, whenever it lost the last
        n_dead = int((~rows.mask_FK.any(1)).sum()) if ranking.alive else numerics.dead_rows(dense_FK, rows.values_FK)
        records.append(
            PrunedLayer(
                name=weight.name,
                layer_type=weight.layer_type,
                n_rows=weight.n_rows,
                fan_in=weight.fan_in,
                kept=int(rows.mask_FK.sum()),
                strategies=rows.strategies if has_strategies else {},
                dead_rows=n_dead,
                eps_F=rows.eps_F if has_bound else None,
                eps=eps,
                sign_complexity=complexity,
                kappa=kappas.get(weight.name) if has_bound else None,
                eps_measured=eps_measured[i],
            )
        )
    return tuple(records)


# --- How many inputs T4 needs -----------------------------------------------------------------------------------------


def factor_of(method: str) -> int:
    """The factor c of T4 for the statement about the rows that a method prunes."""
    return SIMPLE_FACTOR if method == "sipp-simple" else PRUNE_FACTOR


def calibration_needed(n_outputs: int, max_fan_in: int, delta: float, *, factor: int, k_constant: float) -> int:
    """n = ceil(K_s ln(c eta rho / delta)) of T4."""
    check.share("delta", delta)
    check.number("k_constant", k_constant, above=0)
    return math.ceil(k_constant * (math.log(factor * n_outputs * max_fan_in) - math.log(delta)))


# --- Rows, layers and the network -------------------------------------------------------------------------------------


def row_guarantee(
    ranking: Ranking, scores: Sensitivities, dense: Sequence[Tensor], factor: int, reasons: Sequence[str]
) -> Guarantee:
    """Checks the conditions of T4 for the scores of a ranking; `reasons` are further causes why they fail."""
    options = ranking.options
    is_used = [weight_FK != 0 for weight_FK in dense]
    n_never_above = 0
    if scores.reduce == "max":
        for layer, used_FK in zip(scores.layers, is_used):
            n_never_above += int((used_FK & (layer.sensitivity_FK.cpu() <= 1 / options.c_constant)).sum())
    conditions = Guarantee(
        delta=options.delta,
        n=scores.n_distinct,
        n_needed=calibration_needed(
            scores.n_outputs, scores.max_fan_in, options.delta, factor=factor, k_constant=options.k_constant
        ),
        unit="batches" if scores.batch_dependent else "inputs",
        c_constant=options.c_constant,
        k_constant=options.k_constant,
        reason="",
        n_weights=sum(int(used_FK.sum()) for used_FK in is_used),
        n_never_above=n_never_above,
        layers=Coverage.of(scores.n_distinct, 1, options.confidence),
    )
    n, unit = conditions.n, conditions.unit
    causes = [*reasons, scores.dependence] if scores.dependence else list(reasons)
    if scores.reduce != "max":
        causes.insert(
            0, "sensitivities were averaged over patches (reduce='mean'), but bounds are proved for the maximum only"
        )
    elif conditions.contradicted:
        causes.insert(
            0,
            f"the theory assumes that every weight sometimes gives more than 1/C = {1 / options.c_constant:.3g} of "
            f"its row's sum, but {n_never_above:,} of {conditions.n_weights:,} never did in {n:,} {unit}",
        )
    if n < conditions.n_needed:
        repeated = "" if scores.n_points == n or scores.batch_dependent else ", equal ones counted once"
        causes.append(f"too few calibration {unit} (n={n}{repeated}, needs {conditions.n_needed})")
    return replace(conditions, reason="; ".join(causes))


def network_epsilon(
    scores: Sensitivities, eps: Sequence[float], lipschitz: Sequence[float], holdout: Sensitivities | None = None
) -> tuple[float | None, dict[str, float]]:
    """epsilon of T12 and the kappas by weight name; None if a layer's norms are unknown.

    Without a holdout, each layer contributes its largest Q_l(x) / ||f(x)|| over S. With one, which the pruning has not
    seen, eps(x) is computed for each point, and the largest is taken.
    """
    layers = scores.layers
    in_order = sorted(range(len(layers)), key=lambda i: layers[i].order)
    lipschitz_after, kappas, total = 1.0, {}, 0.0
    total_B: Tensor | None = None
    for i in reversed(in_order):
        layer, quadrants_B = layers[i], (scores if holdout is None else holdout).layers[i].quadrants_B
        if layer.output_ratio is None or layer.sign_complexity is None or quadrants_B is None:
            return None, {}
        kappas[layer.weight.name] = lipschitz_after * layer.output_ratio
        if eps[i] != 0:  # a layer that loses nothing adds nothing, also where a norm is infinite
            if holdout is None:
                total += lipschitz_after * eps[i] * float(quadrants_B.max())
            else:
                term_B = lipschitz_after * eps[i] * quadrants_B
                total_B = term_B if total_B is None else total_B + term_B
        lipschitz_after *= lipschitz[i]
    if total_B is not None:
        total = math.nan if bool(total_B.isnan().any()) else float(total_B.max())
    return (total if not math.isnan(total) else math.inf), dict(reversed(kappas.items()))


def lipschitz_of(dense: Sequence[Tensor], cut: Cut) -> list[float]:
    """Lip_k of each layer: the larger of the dense and the pruned norm, as sampled weights are re-weighted."""
    pairs = ((dense_FK, row.values_FK) for dense_FK, row in zip(dense, cut.rows))
    return [max(float(weight_FK.to(numerics.BOUND_DTYPE).norm()) for weight_FK in pair) for pair in pairs]


def paper_bound(
    ranking: Ranking,
    scores: Sensitivities,
    cut: Cut,
    epsilon: float | None,
    *,
    obstacle: str,
    reasons: Sequence[str],
    holdout: Sensitivities | None,
) -> NetworkBound:
    """The bound of T12, with every reason why it does not apply (`obstacle`: the model is no chain)."""
    covered = network_coverage(scores, ranking.options.confidence, holdout)
    causes = list(reasons)
    if epsilon is None:
        causes.append("the inputs of a batch cannot be told apart in every layer and in the output")
    elif math.isinf(epsilon):
        causes.append("epsilon is infinite: a row has no bound, or the output is zero for an input")
    if obstacle:
        causes.append(f"the paper's formula does not apply: {obstacle}")
    if covered.share > Coverage.MOST_SHARE:
        maxima = "a maximum" if covered.q == 1 else f"{covered.q} maxima"
        causes.append(f"{covered.n} inputs are too few for {maxima}: nothing follows for most new inputs")
    # T4's factor for T12 leaves no share of delta to sampling: with sampled rows the one of T6 is needed.
    factor = PRUNE_FACTOR if _is_sampled(cut) else NETWORK_FACTOR
    conditions = row_guarantee(ranking, scores, ranking.dense, factor, causes)
    if epsilon is None or scores.reduce != "max":
        return NetworkBound.none(conditions.reason, ranking.options.delta)
    reason = "; ".join((*causes, CONTRADICTED)) if conditions.contradicted else conditions.reason
    return NetworkBound("paper", epsilon, ranking.options.delta, conditions, reason, covered)


def network_coverage(scores: Sensitivities, confidence: float, holdout: Sensitivities | None) -> Coverage:
    """The share of inputs that the network bound may miss (T18): one maximum over a holdout, or one per layer over S.

    All layers count, not only those that lose weights, because S chose which ones do.
    """
    if holdout is not None:
        return Coverage.of(scores.n_new(holdout), 1, confidence)
    return Coverage.of(scores.n_distinct, len(scores.layers), confidence)


# --- The constant measured (T19) --------------------------------------------------------------------------------------


def measure_constant(scores: Sensitivities, holdout: Sensitivities, confidence: float) -> Measured:
    """C of T19: the largest ratio g_j(x) / s_j over the weights and the points of a holdout, s_j of the scored points.

    A maximum over points is the largest quotient of the two maxima, so single points are not needed.
    """
    n = scores.n_new(holdout)
    reason = scores.dependence or holdout.dependence
    if scores.batch_dependent:
        reason = "with BatchNorm on batch statistics, single inputs cannot be looked at"
    if scores.reduce != "max":
        reason = "sensitivities were averaged over patches (reduce='mean')"
    if reason:
        return Measured(None, 1.0, confidence, n, reason)
    pairs = zip(scores.layers, holdout.layers)
    quotients = [float((new.sensitivity_FK / floored(old.sensitivity_FK)).max()) for old, new in pairs]
    return constant_of(quotients, n, scores.max_fan_in, confidence)


def constant_of(quotients: Iterable[float], n: int, max_fan_in: int, confidence: float) -> Measured:
    """The constant that follows from the largest quotients, seen at `n` distinct new points.

    T18 gives the share of inputs beyond it: d with (1 - d)^n = 1 - confidence. Holdouts are too small for a rank below
    the first to be useful (k* = 0 of T14).
    """
    share = Coverage.of(n, 1, confidence).share
    if share > Coverage.MOST_SHARE:
        why = f"too few inputs: {n} of the holdout are new, so nothing follows for most new inputs"
        return Measured(None, 1.0, confidence, n, why)
    found = list(quotients)
    constant = math.inf if any(map(math.isnan, found)) else max(found) * (1 + ratio_rounding(max_fan_in))
    if not math.isfinite(constant):
        return Measured(None, 1.0, confidence, n, "a ratio was not finite")
    return Measured(constant, share, confidence, n, "")


def floored(sensitivity_FK: Tensor) -> Tensor:
    """s_j (float64), raised to at least a small share of the row's maximum, so that none is 0 (T19).

    For a row that no point reached the maximum is taken as 1, which ratios cannot exceed.
    """
    sensitivity_FK = sensitivity_FK.to(numerics.BOUND_DTYPE)
    most_F1 = sensitivity_FK.amax(1, keepdim=True)
    return torch.maximum(sensitivity_FK, LEAST_OF_ROW * torch.where(most_F1 > 0, most_F1, 1.0))


def ratio_rounding(fan_in: int) -> float:
    """The largest relative difference that float32 rounding can make between two equal ratios of this fan-in."""
    return 2 * (fan_in + FEW_ROUNDINGS) * FLOAT32_UNIT
