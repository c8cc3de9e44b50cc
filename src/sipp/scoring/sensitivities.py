"""Empirical sensitivities of every prunable weight, and the norms the bounds need, from one pass over the data.

T1-T3: for row i, weight j of sign s and activations of sign t,
    s_ij = max over points and patches p of  w_ij a_pj^t / D_pi^{st},    D^{st} = W^s a^t,    0/0 := 0
         = |w_ij| * max_p ( a_pj^t * 1/D_pi^{st} ):  a matrix product in the (max, x) semiring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from sipp.checking import check_choice, check_whole
from sipp.distinct import key_of_batch, n_new
from sipp.errors import DataError
from sipp.inputs.apart import hold_back
from sipp.inputs.batches import FEWEST_POINTS, Data, batches_of, fresh, points_at
from sipp.inputs.capture import Forms, capture, depends_on_batch, output_norms, run_batch, scoring_mode
from sipp.inputs.independence import ORDER, allowed_between, why_dependent
from sipp.inputs.layers import Selector, Site, find_sites, unwrap
from sipp.inputs.pointkeys import draw_keys_of
from sipp.numerics import device_of
from sipp.records import Batch, NormStats, Reduce, Scores, Use, Weight, from_rows
from sipp.scoring import kernels
from sipp.scoring.kernels import Kernel
from sipp.scoring.running_sensitivities import RunningSensitivities
from sipp.scoring.theory_points import resolve_points

ChunkBytes = int | Literal["auto"]  # the memory that scoring may take beside the model's own
MOST_LOOKED_AT = 32  # points of the first batch, for whether outputs are functions of their points
# A CPU works tile by tile in its caches whatever the chunk; a GPU needs large pieces of work (docs/performance.md).
AUTO_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}


def sensitivity(
    model: nn.Module,
    data: Data,
    *,
    reduce: Reduce = "max",
    include: Selector | None = None,
    exclude: Selector | None = None,
    norm_stats: NormStats = "running",
    n_points: int | Literal["theory"] | None = None,
    delta: float = 1e-16,
    seed: int = 0,
    chunk_bytes: ChunkBytes = "auto",
    kernel: Kernel = "auto",
) -> dict[str, Tensor]:
    """The sensitivity of every prunable weight, {parameter name: float32 tensor of the parameter's shape}, in [0, 1].

    All points are used unless `n_points` says how many; "theory" takes what T4 asks for at `delta`, which serves
    nothing else here.

    Example:
        >>> import sipp, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> scores = sipp.sensitivity(model, torch.rand(8, 4))
        >>> {name: tuple(score.shape) for name, score in scores.items()}
        {'0.weight': (3, 4), '2.weight': (2, 3)}
    """
    model = unwrap(model)
    n, data = resolve_points(model, data, n_points, delta, include=include, exclude=exclude)
    scores = score(
        model,
        find_sites(model, include=include, exclude=exclude),
        data,
        reduce=reduce,
        norm_stats=norm_stats,
        n_points=n,
        seed=seed,
        chunk_bytes=chunk_bytes,
        kernel=kernel,
    )
    return {
        layer.weight.name: from_rows(layer.weight, layer.sensitivity_FK, model.get_parameter(layer.weight.name))
        for layer in scores.layers
    }


def score(
    model: nn.Module,
    sites: tuple[Site, ...],
    data: Data,
    *,
    reduce: Reduce = "max",
    norm_stats: NormStats = "running",
    n_points: int | None = None,
    seed: int = 0,
    chunk_bytes: ChunkBytes = "auto",
    kernel: Kernel = "auto",
    on_batch: Callable[[Batch], None] | None = None,
    checked: Forms | None = None,
    splits: bool = False,
) -> Scores:
    """The scores of all weights of `sites` over the calibration points (T3), with the norms of T11 and T12.

    `checked` holds the forms of batches whose layers were checked in earlier calls (see `capture`), and grows.
    With `splits` the last points are S2 of T19, and their maxima are kept apart from those of S1 too.
    """
    _check_options(reduce, norm_stats)
    is_batch_dependent = depends_on_batch(model, norm_stats)
    splits = splits and reduce == "max" and not is_batch_dependent
    device = device_of(model)
    chosen = kernels.pick(kernel, device)
    n_bytes = chunk_of(chunk_bytes, device)
    weights = {weight.name: weight for site in sites for weight in site.weights.values()}
    tallies = {name: RunningSensitivities(weight, model, chosen, reduce, n_bytes) for name, weight in weights.items()}
    total_points = n_batches = largest_batch = 0
    looks = checked is None and not is_batch_dependent  # at whether outputs are functions of their points
    dependence, checked = "", {} if checked is None else checked
    keys: set[bytes] = set()
    apart: set[bytes] = set()  # the points of S2

    def on_output(output: Any, batch: Batch) -> None:
        norms_B = output_norms(output, batch.n_points)
        for tally in tallies.values():
            tally.close_batch(norms_B)

    few = FEWEST_POINTS if reduce == "mean" and _waits(model, sites, data, device, norm_stats) else None
    batches = batches_of(data, device=device, n_points=n_points, seed=seed, batch_size=few)
    for batch, n_first in hold_back(batches) if splits else ((batch, batch.n_points) for batch in batches):
        found = draw_keys_of(batch)
        keys |= {key_of_batch(found)} if is_batch_dependent else set(found[:n_first])
        apart |= set(found[n_first:])
        # A mean over a point's patches ends with its last use, so the uses are counted first, in a pass of their own.
        n_uses = _count_uses(model, sites, batch, norm_stats) if reduce == "mean" else {}
        n_seen = sum(tally.order is not None for tally in tallies.values())

        def on_use(
            weight: Weight, use: Use, batch: Batch, n_uses: dict[str, int] = n_uses, n_first: int = n_first
        ) -> None:
            nonlocal n_seen
            tally = tallies[weight.name]
            if tally.order is None:
                tally.order, n_seen = n_seen, n_seen + 1
            tally.add(use, batch, n_uses.get(weight.name, 1), n_first)

        capture(model, sites, [batch], on_use=on_use, on_output=on_output, norm_stats=norm_stats, checked=checked)
        if total_points == 0 and looks:
            dependence = _dependence(model, points_at(batch, slice(MOST_LOOKED_AT)), norm_stats)
        total_points, n_batches = total_points + batch.n_points, n_batches + 1
        largest_batch = max(largest_batch, batch.n_points)
        if on_batch is not None:
            on_batch(batch)
    return Scores(
        layers=tuple(tally.result() for tally in tallies.values()),
        n_points=total_points,
        n_batches=n_batches,
        largest_batch=largest_batch,
        reduce=reduce,
        norm_stats=norm_stats,
        batch_dependent=is_batch_dependent,
        keys=frozenset(keys | apart),
        dependence=dependence,
        n_apart=n_new(apart, keys) if splits and all(tally.tells_apart for tally in tallies.values()) else None,
    )


def _dependence(model: nn.Module, batch: Batch, norm_stats: NormStats) -> str:
    """Why the output at a point of this batch is no function of that point alone; a dimension 0 of time is refused."""
    with scoring_mode(model, norm_stats):
        reason = why_dependent(batch, lambda part: run_batch(model, fresh(part)), allowed_between(model, batch))
    if reason == ORDER:
        raise DataError(f"{batch.where}: {reason}")
    return reason


def _waits(model: nn.Module, sites: tuple[Site, ...], data: Data, device: torch.device, norm_stats: NormStats) -> bool:
    """Whether a weight is used several times for a point: its sums wait for the last use, for all points of a batch."""
    if not isinstance(data, Tensor | TensorDataset):  # batches come as they are, or few at a time
        return False
    few = next(batches_of(data, device=device, n_points=min(2, len(data)) or 1, refuses_non_finite=False))
    return max(_count_uses(model, sites, few, norm_stats).values(), default=0) > 1


def _count_uses(model: nn.Module, sites: tuple[Site, ...], batch: Batch, norm_stats: NormStats) -> dict[str, int]:
    """How often each weight is used in the forward pass of this batch."""
    counts: Counter[str] = Counter()

    def on_use(weight: Weight, use: Use, batch: Batch) -> None:
        counts[weight.name] += 1

    capture(model, sites, [batch], on_use=on_use, on_output=lambda output, batch: None, norm_stats=norm_stats)
    return dict(counts)


def chunk_of(chunk_bytes: ChunkBytes, device: torch.device) -> int:
    """The number of bytes that "auto" means on this device; any other choice must be a positive number."""
    if isinstance(chunk_bytes, str) and chunk_bytes == "auto":
        return AUTO_CHUNK_BYTES.get(device.type, AUTO_CHUNK_BYTES["cpu"])
    return check_whole("chunk_bytes (a number of bytes, or 'auto')", chunk_bytes, least=1)


def _check_options(reduce: str, norm_stats: str) -> None:
    check_choice("reduce", reduce, get_args(Reduce))
    check_choice("norm_stats", norm_stats, get_args(NormStats))
