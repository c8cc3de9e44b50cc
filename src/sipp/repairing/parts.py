"""Calibration points in; the ones to fit, the ones to choose on and the ones that only judge out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from sipp.errors import DataError
from sipp.inputs.batches import concatenated, fresh, points_at, tensors_of_inputs
from sipp.inputs.data import AnyData, data_of, points_per_batch
from sipp.inputs.distance import output_error
from sipp.inputs.point_keys import draw_keys_of
from sipp.records.batches import Batch
from sipp.records.numerics import device_of, integers
from sipp.repairing.gathering import Census, Targets

# One point in so many is kept aside. Half of these choose the ridges, leave layers alone and stop the polish; the rest
# choose nothing, and tell how good the result is. Where those would be too few, all of them choose and none tells.
ASIDE_OF = 10
FEWEST_JUDGES = 4  # different points, none of them a copy of one that was fitted or that chose
FEWEST_POINTS = 10


@dataclass
class DenseSide:
    """What the dense network gives on some points: the same for every fit to them, and kept as far as there is room."""

    censuses: dict[tuple[tuple[str, ...], int], Census] = field(default_factory=dict)  # by weights, and patches wanted
    targets: dict[tuple[tuple[str, ...], ...], list[Targets]] = field(default_factory=dict)  # by weights, and corrected
    n_bytes: int = 0  # of the targets


@dataclass(frozen=True)
class Parts:
    """The calibration points, batch by batch, which of them are kept aside to choose, and those that only judge."""

    batches: Sequence[Batch]
    is_aside: tuple[bool, ...]
    judging: tuple[Batch, ...]
    keys: frozenset[bytes]  # of all points
    known: DenseSide | None = None  # for several fits of copies of one network to the points in `batches`

    @property
    def fitted(self) -> list[Batch]:
        return [batch for batch, is_one in zip(self.batches, self.is_aside) if not is_one]

    @property
    def aside(self) -> list[Batch]:
        return [batch for batch, is_one in zip(self.batches, self.is_aside) if is_one]


def parts_of(dense: nn.Module, data: AnyData, *, n_points: int | None = None, seed: int = 0) -> Parts:
    """The points that a repair of this network is given, read once."""
    return divided(data_of(data, device=device_of(dense), n_points=n_points, seed=seed).batches())


def divided(batches: Iterable[Batch]) -> Parts:
    """Each batch cut in two: points to fit, and points kept aside, which make batches of their own."""
    parts: dict[bool, list[Batch]] = {False: [], True: []}
    n_seen, most, different, fitted_keys = 0, 0, set[bytes](), set[bytes]()
    for batch in batches:
        keys = draw_keys_of(batch)
        different |= set(keys)
        most = max(most, batch.n_points)
        where = integers(n_seen, n_seen + batch.n_points) % ASIDE_OF == ASIDE_OF - 1
        n_seen += batch.n_points
        fitted_keys |= {key for key, is_aside in zip(keys, where.tolist()) if not is_aside}
        for flag, found in parts.items():
            at = (where == flag).nonzero().flatten()
            if len(at):
                found.append(fresh(points_at(batch, at)))
    if len(different) < FEWEST_POINTS:  # copies kept aside would praise what was fitted to them
        copies = "" if len(different) == n_seen else " different"
        raise DataError(
            f"calibration holds {len(different)}{copies} inputs", fix=f"give a repair at least {FEWEST_POINTS}"
        )
    choosing, judging = _halved(parts[True], fitted_keys)
    fitted, aside = parts[False], together(choosing, most)
    is_aside = (False,) * len(fitted) + (True,) * len(aside)
    return Parts((*fitted, *aside), is_aside, tuple(together(judging, most)), frozenset(different))


def _halved(aside: list[Batch], fitted_keys: set[bytes]) -> tuple[list[Batch], list[Batch]]:
    """Every second point chooses and the others judge, but for copies; all choose where too few would judge."""
    choosing, rest, n_seen = list[Batch](), list[Batch](), 0
    for batch in aside:
        is_second = integers(n_seen, n_seen + batch.n_points) % 2 == 1
        n_seen += batch.n_points
        for found, where in ((choosing, ~is_second), (rest, is_second)):
            if bool(where.any()):
                found.append(points_at(batch, where.nonzero().flatten()))
    used = fitted_keys | {key for batch in choosing for key in draw_keys_of(batch)}
    judging, judging_keys = list[Batch](), list[bytes]()
    for batch in rest:
        keys = draw_keys_of(batch)
        new = [i for i, key in enumerate(keys) if key not in used]
        judging_keys += [keys[i] for i in new]
        if new:
            judging.append(points_at(batch, torch.tensor(new, dtype=torch.int64, device="cpu")))
    return (choosing, judging) if len(set(judging_keys)) >= FEWEST_JUDGES else (aside, [])


def together(batches: Sequence[Batch], most: int) -> list[Batch]:
    """The points in as few batches as can be made of neighbours that are alike, none larger than `most`."""
    found: list[Batch] = []
    for batch in batches:
        fits = found and found[-1].n_points + batch.n_points <= most
        both = concatenated(found[-1], batch) if fits else None
        if both is None:
            found.append(batch)
        else:
            found[-1] = both
    return found


def in_large_batches(parts: Parts) -> Parts:
    """The same points, on a GPU in as large batches as are made of a tensor: with small ones it waits for Python."""
    fitted = together(parts.fitted, max(map(_room, parts.fitted)))
    is_aside = (False,) * len(fitted) + (True,) * len(parts.aside)
    return replace(parts, batches=(*fitted, *parts.aside), is_aside=is_aside)


def _room(batch: Batch) -> int:
    """How many points like these a GPU takes at once; 0 elsewhere."""
    inputs = [value for value in tensors_of_inputs(batch).values() if isinstance(value, Tensor) and value.is_cuda]
    return min((points_per_batch(one, one.device) for one in inputs), default=0)


def judged_error(dense: nn.Module, other: nn.Module, parts: Parts) -> float | None:
    """The output's error on the points that chose nothing; None where there are none."""
    return output_error(dense, other, parts.judging) if parts.judging else None
