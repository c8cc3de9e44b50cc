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
T19  C is measured on points held back from scoring, instead of assumed.

Pruned, user-masked and repaired networks are treated alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sipp.bounds.sound import sound_network_bound
from sipp.inputs.data import AnyData
from sipp.inputs.structure import why_no_chain
from sipp.inputs.trace import record
from sipp.pruning.cutting import Cut, dead_rows
from sipp.pruning.sparse_rows import RAND, STRATEGIES, eps_given
from sipp.results.bounds import MOST_SHARE, Coverage, Guarantee, Measured, NetworkBound, coverage, layer_bound, no_bound
from sipp.results.display import listed
from sipp.results.numerics import BOUND_DTYPE, ratio_rounding
from sipp.results.options import Mode
from sipp.results.pruned import PrunedLayer
from sipp.results.ranking import LayerSensitivities, Ranking, Sensitivities
from sipp.scoring.sensitivities import measure_sensitivities
from sipp.scoring.task import NETWORK_FACTOR, PRUNE_FACTOR, ScoringTask, calibration_needed, factor_of

LEAST_OF_ROW = 1e-3  # share of the row's largest sensitivity: the least that a weight counts in T19
CONTRADICTED = "the data contradicts the theory's assumption"  # the statement about rows says by what


@dataclass(frozen=True)
class Statements:
    """The guarantees of a cut network, and the record of each layer."""

    guarantee: Guarantee | None
    bound: NetworkBound
    measured: Measured | None
    layers: tuple[PrunedLayer, ...]


def statements_of(
    ranking: Ranking, cut: Cut, task: ScoringTask | None, mode: Mode, new_points: AnyData | None
) -> Statements:
    """Computes the guarantees of a cut, and the record of each layer.

    `new_points` are inputs that the pruning has not seen. In mode "paper" they make the bound on the network smaller
    (T18); their norms are computed with the options of `task`. Mode "sound" (T13) gives no bound without them.
    """
    scores, norms = ranking.sensitivities, None
    if scores is None:
        bound = no_bound(ranking.why_no_sensitivities, ranking.options.delta)
        layers = tuple(_layer_record(ranking, i, cut, bound, None) for i in range(len(cut.rows)))
        return Statements(None, bound, None, layers)
    if mode == "paper" and new_points is not None and task is not None:
        norms = measure_sensitivities(replace(task.with_points(None, new_points), seed=0))
    obstacle, reasons = _obstacle(ranking, cut), _why_rows_have_no_bound(ranking, cut)
    measured, eps_measured = _measured(ranking, scores, cut, obstacle, norms)
    guarantee = row_guarantee(ranking, scores, cut.dense, factor_of(ranking.method_name), reasons)
    bound = paper_bound(ranking, scores, cut, obstacle=obstacle, reasons=reasons, holdout=norms)
    layers = tuple(_layer_record(ranking, i, cut, bound, eps) for i, eps in enumerate(eps_measured))
    if mode == "sound" and new_points is not None:
        bound = sound_network_bound(ranking.model, cut.model, new_points, scores, confidence=ranking.options.confidence)
    left_out = listed(cut.others) if cut.others else ""
    return Statements(replace(guarantee, left_out=left_out), bound, replace(measured, left_out=left_out), layers)


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
    return any(bool((row.strategy_FS == RAND).any()) for row in cut.rows)


def _obstacle(ranking: Ranking, cut: Cut) -> str:
    """Why T12 does not apply to the model; empty if it does."""
    if cut.others:
        return f"{cut.others[0]} changed too, and is not a pruned weight"
    assert ranking.sample is not None
    weights = {weight.name for weight in ranking.weights}
    return why_no_chain(ranking.model, record(ranking.model, ranking.sample), weights)


def _measured(
    ranking: Ranking, scores: Sensitivities, cut: Cut, obstacle: str, holdout: Sensitivities | None
) -> tuple[Measured, Sequence[float | None]]:
    """The measured constant (T19) with its bounds for layers and network, and eps of each layer (T17).

    A sampled row is bounded by its actual values (T17), because T6 is proved for T4's C only.
    """
    measured = measure_constant(scores, ranking.options.confidence)
    if measured.c_constant is None:
        return measured, [None] * len(cut.rows)
    eps: list[float] = []
    for layer, row, dense_FK in zip(scores.layers, cut.rows, cut.dense):
        first_FK = floored_sensitivity(layer).cpu()
        eps.append(float(eps_given(dense_FK, row.values_FK, first_FK, c_constant=measured.c_constant).max()))
    delta_share = coverage(scores.n_distinct, 1, measured.confidence).share
    measured = replace(measured, layers_share=min(1.0, measured.share + delta_share))
    share = min(1.0, measured.share + network_coverage(scores, measured.confidence, holdout).share)
    epsilon, _ = network_epsilon(scores, eps, lipschitz_of(cut), holdout)
    reason = ""
    if obstacle:
        reason = f"the paper's formula does not apply: {obstacle}"
    elif epsilon is None or math.isinf(epsilon):
        reason = "a norm is unknown, or epsilon is infinite"
    elif share > MOST_SHARE:
        reason = "too few inputs for as many maxima as there are layers"
    if reason:
        return replace(measured, network_reason=reason), eps
    return replace(measured, epsilon=epsilon, network_share=share), eps


def _layer_record(ranking: Ranking, i: int, cut: Cut, bound: NetworkBound, eps_measured: float | None) -> PrunedLayer:
    rows = cut.rows[i]
    weight, scores = ranking.weights[i], ranking.sensitivities
    has_bound = scores is not None and scores.reduce == "max"
    complexity = scores.layers[i].sign_complexity if scores is not None else None
    names = STRATEGIES if ranking.method_name.startswith("sipp") else {}
    eps = float(rows.eps_F.max()) if has_bound else None
    return PrunedLayer(
        name=weight.name,
        layer_type=weight.layer_type,
        n_rows=weight.n_rows,
        fan_in=weight.fan_in,
        kept=int(rows.mask_FK.sum()),
        strategies={name: int((rows.strategy_FS == code).sum()) for code, name in names.items()},
        dead_rows=dead_rows(cut.dense[i], rows.values_FK),
        eps_F=rows.eps_F if has_bound else None,
        eps=eps,
        sign_complexity=complexity,
        bound=layer_bound(eps, complexity),
        kappa=bound.kappas.get(weight.name) if has_bound else None,
        eps_measured=eps_measured if eps_measured is not None and math.isfinite(eps_measured) else None,
    )


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
        layers=coverage(scores.n_distinct, 1, ranking.options.confidence),
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


def lipschitz_of(cut: Cut) -> list[float]:
    """Lip_k of each layer: the larger of the dense and the pruned norm, as sampled weights are re-weighted."""
    pairs = ((dense_FK, row.values_FK) for dense_FK, row in zip(cut.dense, cut.rows))
    return [max(float(weight_FK.to(BOUND_DTYPE).norm()) for weight_FK in pair) for pair in pairs]


def paper_bound(
    ranking: Ranking,
    scores: Sensitivities,
    cut: Cut,
    *,
    obstacle: str,
    reasons: Sequence[str],
    holdout: Sensitivities | None,
) -> NetworkBound:
    """The bound of T12, with every reason why it does not apply (`obstacle`: the model is no chain)."""
    eps = [float(row.eps_F.max()) for row in cut.rows]
    epsilon, kappas = network_epsilon(scores, eps, lipschitz_of(cut), holdout)
    covered = network_coverage(scores, ranking.options.confidence, holdout)
    causes = list(reasons)
    if epsilon is None:
        causes.append("the inputs of a batch cannot be told apart in every layer and in the output")
    elif math.isinf(epsilon):
        causes.append("epsilon is infinite: a row has no bound, or the output is zero for an input")
    if obstacle:
        causes.append(f"the paper's formula does not apply: {obstacle}")
    if covered.share > MOST_SHARE:
        maxima = "a maximum" if covered.q == 1 else f"{covered.q} maxima"
        causes.append(f"{covered.n} inputs are too few for {maxima}: nothing follows for most new inputs")
    # T4's factor for T12 leaves no share of delta to sampling: with sampled rows the one of T6 is needed.
    factor = PRUNE_FACTOR if _is_sampled(cut) else NETWORK_FACTOR
    conditions = row_guarantee(ranking, scores, cut.dense, factor, causes)
    if epsilon is None or scores.reduce != "max":
        return no_bound(conditions.reason, ranking.options.delta)
    reason = "; ".join((*causes, CONTRADICTED)) if conditions.contradicted else conditions.reason
    return NetworkBound("paper", epsilon, ranking.options.delta, conditions, reason, kappas, covered)


def network_coverage(scores: Sensitivities, confidence: float, holdout: Sensitivities | None) -> Coverage:
    """T18 for the network bound: one maximum over a holdout, or one per layer over S.

    All layers count, not only those that lose weights, because S chose which ones do.
    """
    if holdout is not None:
        return coverage(len(holdout.keys - scores.all_seen_keys), 1, confidence)
    return coverage(scores.n_distinct, len(scores.layers), confidence)


def floored_sensitivity(layer: LayerSensitivities) -> Tensor:
    """s_j on S1 (float64), raised to at least a small share of the row's maximum, so that none is 0 (T19).

    For a row that no point of S1 reached the maximum is taken as 1, which ratios cannot exceed.
    """
    given_FK = layer.sensitivity_FK if layer.sensitivity_s1_FK is None else layer.sensitivity_s1_FK
    s1_FK = given_FK.to(BOUND_DTYPE)
    most_F1 = s1_FK.amax(1, keepdim=True)
    return torch.maximum(s1_FK, LEAST_OF_ROW * torch.where(most_F1 > 0, most_F1, 1.0))


def measure_constant(scores: Sensitivities, confidence: float) -> Measured:
    """Measures C of T19 on the points of S2, or says why it cannot.

    C is the largest ratio R(x) = max_j g_j(x) / s_j over the points of S2, with s_j of S1. A maximum over points is the
    largest quotient of the two maxima, so single points are not needed. S2 is too small for a rank below the first to
    be useful (k* = 0 of T14). T18 gives the share: d with (1 - d)^n = 1 - confidence.
    """
    n = scores.n_apart or 0

    def none(reason: str) -> Measured:
        return Measured(None, 1.0, confidence, n, reason)

    if scores.reduce != "max":
        return none("sensitivities were averaged over patches (reduce='mean')")
    if scores.batch_dependent:
        return none("with BatchNorm on batch statistics, single inputs cannot be looked at")
    if scores.dependence:
        return none(scores.dependence)
    if scores.n_apart is None:
        return none("no calibration inputs were held back, or a layer does not show which values belong to which input")
    share = coverage(n, 1, confidence).share
    if share > MOST_SHARE:
        return none(f"too few inputs: {n} of {scores.n_points} were held back, so nothing follows for most new inputs")
    seen = [(layer, layer.sensitivity_s2_FK) for layer in scores.layers if layer.sensitivity_s2_FK is not None]
    quotients = [float((s2_FK.to(BOUND_DTYPE) / floored_sensitivity(layer)).max()) for layer, s2_FK in seen]
    if any(math.isnan(quotient) for quotient in quotients):
        return none("a ratio was not a number")
    constant = max(quotients, default=0.0) * (1 + ratio_rounding(scores.max_fan_in))
    if not math.isfinite(constant):
        return none("a ratio was not finite")
    return Measured(constant, share, confidence, n, "")
