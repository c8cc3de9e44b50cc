"""Tests the theory's assumption (T4) on data, and measures its constant (T19).

T4 assumes  P(g_j(x) <= 1/C) <= exp(-1/K_s)  for every weight j, and concludes the ES inequality
    g_j(x) <= C s_j,    that is  w_j^s a_j^t(x) <= C s_j z^{st}(x)  for all patches of x,
for new points x, from which T5-T12 follow. Three things can be measured:
    on S           the share of weights with g_j(x) > 1/C in a share of at least 1 - exp(-1/K_s) of the points,
    on a holdout   the share of (point, weight) pairs that break the inequality with the s_j of S,
    on a holdout   the C with which no pair would (T19).

Read literally, the assumption is strong: the ratios of a row sum to at most 1 in each patch and quadrant, so fewer than
C of its weights exceed 1/C at once. With C = 3, most weights of a long row cannot, whatever the data, and the
assumption nearly always fails. The inequality may hold nevertheless. It cannot fail for a weight that exceeded 1/C on
any point of S, because a ratio is at most 1 < C s_j then: failures come from weights whose ratios were small on S.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from sipp.bounds.statements import constant_of, floored, ratio_rounding
from sipp.inputs import AnyData, Batch, Data, data_of, depends_on_batch
from sipp.progress import Advance, progress_bar
from sipp.results import (
    Assumption,
    LayerAssumption,
    NormStats,
    PruneOptions,
    Selector,
    check,
    numerics,
)
from sipp.scoring import ratios_of, task_of, unreached_error

SMALLEST_RATIO = torch.finfo(numerics.SCORE_DTYPE).tiny  # smaller float32 ratios have lost digits and count as 0


@torch.inference_mode(False)
def check_assumption(
    model: nn.Module,
    data: AnyData,
    holdout: AnyData | None = None,
    *,
    include: Selector | None = None,
    exclude: Selector | None = None,
    norm_stats: NormStats = "running",
    c_constant: float = PruneOptions.c_constant,
    k_constant: float = PruneOptions.k_constant,
    progress: bool = True,
) -> Assumption:
    """Measures, layer by layer, how far the theory's assumption holds on the data, and on a holdout if there is one.

    With C = 3 the literal assumption nearly always fails once rows have more than a few weights: expect a small share,
    and look at the ES inequality on inputs that are not in `data`, and at the C with which it would have held there.
    Every input is run on its own, so batches do not matter.

    Example:
        >>> import sipp, torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight = torch.nn.Parameter(torch.tensor([[1.0, 1.0]]))
        >>> seen = sipp.check_assumption(model, torch.tensor([[1.0, 1.0], [1.0, 3.0]]), torch.tensor([[9.0, 1.0]]))
        >>> seen.total.share_holding, seen.total.es_failures, seen.total.n_pairs
        (1.0, 0, 2)
    """
    check.flag("progress", progress)
    c_constant = check.number("c_constant", c_constant, above=0)
    check.number("k_constant", k_constant, above=0)
    task = task_of(model, data, include=include, exclude=exclude, norm_stats=norm_stats)
    unit: Literal["inputs", "batches"] = "batches" if depends_on_batch(task.model, task.norm_stats) else "inputs"
    held = None if holdout is None else data_of(holdout, role="holdout", device=numerics.device_of(task.model))
    counts = [task.points.n_points_known, held.n_points_known if held else 0]
    total = None if None in counts else sum(n for n in counts if n)
    sensitivity, n_above, hashes = dict[str, Tensor](), dict[str, Tensor](), list[str]()
    failures, pairs, new_hashes, quotients = Counter[str](), Counter[str](), list[str](), [0.0]
    found = None  # the network is looked at once, not for every draw
    with progress_bar("looking at the assumption", total, shown=progress) as advance:
        for draw in _draws(task.points, unit, advance):
            hashes.append("".join(draw.hashes()))
            ratios, found = ratios_of(task, draw, found)
            for weight, ratio_FK in ratios:
                # a ratio that equals 1/C does not exceed it, also where float32 rounds it up: fewer weights hold
                is_above_FK = ratio_FK > (1 + ratio_rounding(weight.fan_in)) / c_constant
                sensitivity[weight.name] = torch.maximum(sensitivity.get(weight.name, ratio_FK), ratio_FK)
                n_above[weight.name] = n_above.get(weight.name, 0) + is_above_FK.to(torch.int32)
        for weight in task.weights:
            if weight.name not in sensitivity:
                raise unreached_error(weight.name)
        for draw in () if held is None else _draws(held, unit, advance):
            new_hashes.append("".join(draw.hashes()))
            ratios, found = ratios_of(task, draw, found)
            for weight, ratio_FK in ratios:
                seen_FK = sensitivity[weight.name].to(numerics.BOUND_DTYPE)
                limit_FK = c_constant * seen_FK * (1 + 2 * ratio_rounding(weight.fan_in)) + SMALLEST_RATIO
                failures[weight.name] += int((ratio_FK > limit_FK).sum())
                pairs[weight.name] += int((ratio_FK > 0).sum())
                quotients.append(float((ratio_FK / floored(seen_FK)).max()))
    n_new, most = len(set(new_hashes) - set(hashes)), max(weight.fan_in for weight in task.weights)
    needed = -math.expm1(-1 / k_constant)
    layers = tuple(
        LayerAssumption(
            name=weight.name,
            fan_in=weight.fan_in,
            n_weights=weight.n_weights,
            n_holding=int((n_above[weight.name] >= needed * len(hashes)).sum()),
            es_failures=failures[weight.name] if new_hashes else None,
            n_pairs=pairs[weight.name] if new_hashes else None,
        )
        for weight in task.weights
    )
    measured = constant_of(quotients, n_new, most, PruneOptions.confidence) if new_hashes and unit == "inputs" else None
    return Assumption(layers, c_constant, k_constant, len(hashes), len(new_hashes), needed, unit, measured)


def _draws(data: Data, unit: str, advance: Advance) -> Iterator[Batch]:
    """The independent draws of T4: each point as its own batch, or whole batches if points depend on them.

    `advance` is called with the number of points after each draw.
    """
    for batch in data.batches():
        if unit == "batches":
            yield batch
            advance(batch.n_points)
            continue
        for i in range(batch.n_points):
            yield replace(batch.at(slice(i, i + 1)), where=f"{batch.where}, input {i}", labels=None)
            advance(1)
