"""`check_assumption`: how far T4's regularity assumption holds on given data, and how often the ES inequality fails.

T4 assumes  P(g_j(x) <= 1/C) <= exp(-1/K_s)  for every weight j, and concludes the ES inequality
    w_j^s a_j^t(x) <= C s_j z^{st}(x),    z^{st} = sum_k w_k^s a_k^t,
for new points, from which T5-T12 follow. Two things can be measured:
    on S           the share of weights with g_j(x) > 1/C in a share of at least 1 - exp(-1/K_s) of the points,
    on a holdout   the share of (patch, weight) pairs that break the inequality with the s_j of S.

Read literally, the assumption is strong: the ratios of a row sum to at most 1 in each patch and quadrant, so fewer than
C of its weights exceed 1/C at once. With C = 3, most weights of a long row cannot, whatever the data, and the
assumption nearly always fails. The inequality may hold nevertheless. It cannot fail for a weight that exceeded 1/C on
any point of S, because a ratio is at most 1 < C s_j then: failures come from weights whose ratios were small on S.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sipp.inputs.capture import depends_on_batch
from sipp.inputs.data import AnyData, Data, data_of, points_at
from sipp.inputs.probing import Probes, runner
from sipp.progress import Advance, progress_bar
from sipp.results.assumption import Assumption, LayerAssumption, share_needed
from sipp.results.batches import Batch, WeightUse
from sipp.results.checking import check_flag, check_number
from sipp.results.numerics import BOUND_DTYPE, SCORE_DTYPE, device_of, places_of, ratio_rounding
from sipp.results.options import C_CONSTANT, DELTA, K_CONSTANT, Scoring, Selector
from sipp.results.ranking import DrawUnit, Weight, to_rows
from sipp.scoring.running_sensitivities import overflow_error, unreached_error
from sipp.scoring.sensitivities import chunk_bytes_on, measure_sensitivities
from sipp.scoring.task import ScoringTask, resolve_points, task_of

SIGNS = (1, -1)
DOUBLE_BYTES = 8

SMALLEST_RATIO = torch.finfo(SCORE_DTYPE).tiny  # smaller float32 ratios have lost digits and count as 0


@torch.inference_mode(False)
def check_assumption(
    model: nn.Module,
    data: AnyData,
    holdout: AnyData | None = None,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    seed: int = 0,
    scoring: Scoring = Scoring(),
    c_constant: float = C_CONSTANT,
    k_constant: float = K_CONSTANT,
    progress: bool = True,
) -> Assumption:
    """Measures, layer by layer, how far the theory's assumption holds on the data, and on a holdout if there is one.

    With C = 3 the literal assumption nearly always fails once rows have more than a few weights: expect a small share,
    and look at the ES inequality on inputs that are not in `data`. This is no statistical test; it reports the
    frequencies it sees. Every input is run on its own, so batches do not matter.

    Example:
        >>> import sipp, torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight = torch.nn.Parameter(torch.tensor([[1.0, 1.0]]))
        >>> seen = sipp.check_assumption(model, torch.tensor([[1.0, 1.0], [1.0, 3.0]]), torch.tensor([[9.0, 1.0]]))
        >>> seen.total.share_holding, seen.total.es_failures, seen.total.n_pairs
        (1.0, 0, 2)
    """
    check_flag("progress", progress)
    c_constant = check_number("c_constant", c_constant, above=0)
    check_number("k_constant", k_constant, above=0)
    task = task_of(model, data, include=include, exclude=exclude, scoring=scoring, seed=seed)
    task = resolve_points(task, DELTA, k_constant=k_constant)
    unit: DrawUnit = "batches" if depends_on_batch(task.model, task.scoring.norm_stats) else "inputs"
    data, held = task.points, None
    if holdout is not None:
        held = data_of(holdout, role="holdout", device=device_of(task.model), seed=task.seed)
    counts = [data.n_points_known, held.n_points_known if held else 0]
    total = None if None in counts else sum(n for n in counts if n)
    checked: Probes = {}  # the network's layers are checked once, not for every draw
    failures, pairs, n_held_out = Counter[str](), Counter[str](), 0
    with progress_bar("looking at the assumption", total, shown=progress) as advance:
        draws = _draws(data, unit, advance)
        sensitivity, n_above, n_calibration = _calibrated(task, draws, c_constant, checked)
        for draw in () if held is None else _draws(held, unit, advance):
            n_held_out += 1
            for name, n_failures, n_pairs in _holdout_counts(task, draw, sensitivity, c_constant, checked):
                failures[name] += n_failures
                pairs[name] += n_pairs
    needed = share_needed(k_constant) * n_calibration
    layers = tuple(
        LayerAssumption(
            name=weight.name,
            fan_in=weight.fan_in,
            n_weights=weight.n_weights,
            n_holding=int((n_above[weight.name] >= needed).sum()),
            es_failures=failures[weight.name] if n_held_out else None,
            n_pairs=pairs[weight.name] if n_held_out else None,
        )
        for weight in task.weights
    )
    return Assumption(layers, c_constant, k_constant, n_calibration, n_held_out, unit)


def _draws(data: Data, unit: DrawUnit, advance: Advance) -> Iterator[Batch]:
    """The independent draws of T4: each point as its own batch, or whole batches if points depend on them.

    `advance` is called with the number of points after each draw.
    """
    for batch in data.batches():
        if unit == "batches":
            yield batch
            advance(batch.n_points)
            continue
        for i in range(batch.n_points):
            yield replace(points_at(batch, slice(i, i + 1)), where=f"{batch.where}, input {i}", labels=None)
            advance(1)


def _ratios(task: ScoringTask, draw: Batch, checked: Probes) -> dict[str, Tensor]:
    """g_j(x) of T2 (F x K) for every weight that this draw reaches; all other ratios are 0."""
    reached: set[str] = set()

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        lowest, highest = torch.aminmax(use.windows)
        if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
            raise overflow_error(weight.name, "input", where=batch.where)
        reached.add(weight.name)

    runner(task.model, task.layers, task.scoring.norm_stats)(draw, on_use)
    kept = ({local: w for local, w in site.weights.items() if w.name in reached} for site in task.layers)
    layers = tuple(replace(site, weights=weights) for site, weights in zip(task.layers, kept) if weights)
    if not layers:
        return {}
    here = replace(task, layers=layers).with_points(None, [(draw.kwargs or draw.args, None)])
    return {layer.weight.name: layer.sensitivity_FK for layer in measure_sensitivities(here, checked=checked).layers}


def _calibrated(
    task: ScoringTask, draws: Iterable[Batch], c_constant: float, checked: Probes
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """s_j (T3), the number of draws with g_j(x) > 1/C, both F x K by weight name, and the number of draws."""
    sensitivity: dict[str, Tensor] = {}
    n_above: dict[str, Tensor] = {}
    n_draws = 0
    fan_in = {weight.name: weight.fan_in for weight in task.weights}
    for draw in draws:
        n_draws += 1
        for name, ratio_FK in _ratios(task, draw, checked).items():
            # a ratio that equals 1/C does not exceed it, also where float32 rounds it up: fewer weights hold, not more
            is_above_FK = ratio_FK > (1 + ratio_rounding(fan_in[name])) / c_constant
            sensitivity[name] = torch.maximum(sensitivity.get(name, ratio_FK), ratio_FK)
            n_above[name] = n_above.get(name, 0) + is_above_FK.to(torch.int32)
    for name in fan_in:
        if name not in sensitivity:
            raise unreached_error(name)
    return sensitivity, n_above, n_draws


def _holdout_counts(
    task: ScoringTask, draw: Batch, sensitivity: dict[str, Tensor], c_constant: float, checked: Probes
) -> list[tuple[str, int, int]]:
    """For each use of a weight in one draw: its name, the pairs that break the ES inequality, and all pairs."""
    ratios = _ratios(task, draw, checked)
    chunk_bytes = chunk_bytes_on(task.scoring.chunk_bytes, device_of(task.model))
    counts = []

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        rounding = ratio_rounding(weight.fan_in)
        limit_FK = c_constant * sensitivity[weight.name].to(BOUND_DTYPE)
        # Only a weight whose largest ratio of the draw passes its limit has failures: the kernels' ratios tell which,
        # with the rounding on their side, and only these few are looked at pair by pair.
        is_suspect_FK = ratios[weight.name] > limit_FK * (1 - rounding)
        limit_FK = limit_FK * (1 + rounding) + SMALLEST_RATIO
        rows_FK = to_rows(weight, task.model.get_parameter(weight.name).detach()).to(BOUND_DTYPE)
        counts.append((weight.name, *_count(rows_FK, limit_FK, is_suspect_FK, use, chunk_bytes)))

    runner(task.model, task.layers, task.scoring.norm_stats)(draw, on_use)
    return counts


def _count(
    weight_FK: Tensor, limit_FK: Tensor, is_suspect_FK: Tensor, use: WeightUse, chunk_bytes: int
) -> tuple[int, int]:
    """The pairs of one use with w_j^s a_j^t > limit_j z^{st}, j among the suspects, and all pairs with w_j a_j != 0."""
    n_groups = use.windows.shape[1]
    rows = slice(use.row_start, None if use.n_rows is None else use.row_start + use.n_rows)
    weight_GRK, limit_GRK, is_suspect_GRK = (
        matrix_FK[rows].unflatten(0, (n_groups, -1)) for matrix_FK in (weight_FK, limit_FK, is_suspect_FK)
    )
    suspects_3M = is_suspect_GRK.nonzero().t()
    n_nonzero_GK = (weight_GRK != 0).sum(1)
    # patches, their signed part and a mask; the sums of every row; then, M suspects at a time, four M x P matrices
    bytes_per_patch = DOUBLE_BYTES * (3 * n_nonzero_GK.numel() + len(weight_FK[rows]))
    n_failures = n_pairs = 0
    for patches_GPK in _patches(use, max(1, chunk_bytes // bytes_per_patch)):
        n_pairs += int(((patches_GPK != 0).sum(1) * n_nonzero_GK).sum())
        most = max(1, chunk_bytes // (4 * DOUBLE_BYTES * patches_GPK.shape[1]))
        for s, t in itertools.product(SIGNS, SIGNS) if suspects_3M.numel() else ():
            part_GPK = (t * patches_GPK).clamp_(min=0)
            total_GPR = part_GPK @ (s * weight_GRK).clamp_(min=0).mT
            for group_M, row_M, column_M in (piece.unbind() for piece in suspects_3M.split(most, dim=1)):
                weight_M = (s * weight_GRK[group_M, row_M, column_M]).clamp_(min=0)
                limit_MP = limit_GRK[group_M, row_M, column_M][:, None] * total_GPR[group_M, :, row_M]
                n_failures += int((weight_M[:, None] * part_GPK[group_M, :, column_M] > limit_MP).sum())
    return n_failures, n_pairs


def _patches(use: WeightUse, most: int) -> Iterator[Tensor]:
    """The patches of a use (G x P x K, float64, each with a largest magnitude of 1), at most `most` at a time."""
    windows = use.windows.movedim(1, 0)  # (G, B, *positions, *fan_in)
    sizes = windows.shape[1 : 2 + use.n_position_dims]
    for start in range(0, sizes.numel(), most):
        flat_P = torch.arange(start, min(start + most, sizes.numel()), dtype=torch.int64, device=windows.device)
        at: list[Any] = [slice(None), *places_of(flat_P, sizes)]
        patches_GPK = windows[tuple(at)].flatten(2).to(BOUND_DTYPE)
        peak_GP1 = patches_GPK.abs().amax(2, keepdim=True)
        yield patches_GPK / torch.where(peak_GP1 > 0, peak_GP1, torch.ones_like(peak_GP1))
