"""Splits the calibration points into fit, validation and test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import nn

from sipp.errors import DataError
from sipp.inputs import AnyData, Batch, data_of, is_tokens, outputs, points_per_batch
from sipp.results import numerics

# Of every ten points, one at a random place is held back from the fit: data that repeats, say with one point of each
# class in turn, must not lose one class. Half of these are for validation: they choose the ridges, leave layers alone
# and stop the polish. The other half only tests the result. If that half is too small, all are for validation.
HELD_BACK_ONE_IN = 10
FEWEST_TEST_POINTS = 4  # distinct, and no copies of fit or validation points
FEWEST_REPAIR_POINTS = 10

# On a GPU, a batch of tokens takes at most this number of bytes in a pass, and this share of the card's memory. Each
# token keeps the outputs of about four layers alive, the one that is needed and those around it.
BATCH_BYTES, BATCH_MEMORY_SHARE, N_LAYERS_ALIVE = 2 << 30, 1 / 64, 4


@dataclass(frozen=True)
class DataSplit:
    """The calibration points: batches to fit, batches to validate on, and test batches, which choose nothing."""

    batches: Sequence[Batch]  # those to fit first, then those to validate on
    n_fit_batches: int
    test: tuple[Batch, ...]  # not in `batches`
    keys: frozenset[str]  # of all points

    @property
    def fit(self) -> list[Batch]:
        return [self.batches[i] for i in range(self.n_fit_batches)]

    @property
    def validation(self) -> list[Batch]:
        return [self.batches[i] for i in range(self.n_fit_batches, len(self.batches))]

    def test_error(self, dense: nn.Module, other: nn.Module) -> float | None:
        """The error of the output on the test points; None if there are none."""
        return outputs.output_error(dense, other, self.test) if self.test else None


def split_data(dense: nn.Module, data: AnyData) -> DataSplit:
    """The split of the points that this network is repaired on; the data is read once."""
    return split_batches(data_of(data, device=numerics.device_of(dense)).batches())


def split_batches(batches: Iterable[Batch]) -> DataSplit:
    """The split of these batches; held-back points get batches of their own."""
    fit, held_back, n_seen, most = list[Batch](), list[Batch](), 0, 0
    different, fitted_keys = set[str](), set[str]()
    places = _places_to_hold_back()
    for batch in batches:
        keys = batch.hashes()
        different |= set(keys)
        most = max(most, batch.n_points)
        is_held_back = torch.tensor(list(islice(places, batch.n_points)), dtype=torch.bool, device="cpu")
        n_seen += batch.n_points
        fitted_keys |= {key for key, is_one in zip(keys, is_held_back.tolist()) if not is_one}
        for found, where in ((fit, ~is_held_back), (held_back, is_held_back)):
            if bool(where.any()):
                found.append(batch.at(where.nonzero().flatten()).copied())
    if len(different) < FEWEST_REPAIR_POINTS:  # validation on copies of fit points proves nothing
        copies = "" if len(different) == n_seen else " different"
        raise DataError(
            f"calibration holds {len(different)}{copies} inputs", fix=f"give a repair at least {FEWEST_REPAIR_POINTS}"
        )
    validation, test = _halved(held_back, fitted_keys)
    validation = merged_batches(validation, most)
    return DataSplit((*fit, *validation), len(fit), tuple(merged_batches(test, most)), frozenset(different))


def _places_to_hold_back() -> Iterator[bool]:
    """Whether each point is held back, without end; always the same ones."""
    generator = torch.Generator().manual_seed(0)
    while True:
        place = int(torch.randint(HELD_BACK_ONE_IN, (), generator=generator, dtype=torch.int64, device="cpu"))
        yield from (i == place for i in range(HELD_BACK_ONE_IN))


def _halved(held_back: list[Batch], fitted_keys: set[str]) -> tuple[list[Batch], list[Batch]]:
    """Splits the held-back points into validation and test, without copies in the test.

    All are for validation if the test would be too small.
    """
    validation, rest, n_seen = list[Batch](), list[Batch](), 0
    for batch in held_back:
        is_second = numerics.integers(n_seen, n_seen + batch.n_points) % 2 == 1
        n_seen += batch.n_points
        for found, where in ((validation, ~is_second), (rest, is_second)):
            if bool(where.any()):
                found.append(batch.at(where.nonzero().flatten()))
    used = fitted_keys | {key for batch in validation for key in batch.hashes()}
    test, test_keys = list[Batch](), list[str]()
    for batch in rest:
        keys = batch.hashes()
        new = [i for i, key in enumerate(keys) if key not in used]
        test_keys += [keys[i] for i in new]
        if new:
            test.append(batch.at(torch.tensor(new, dtype=torch.int64, device="cpu")))
    return (validation, test) if len(set(test_keys)) >= FEWEST_TEST_POINTS else (held_back, [])


def merged_batches(batches: Sequence[Batch], most: int) -> list[Batch]:
    """The points in fewer batches: neighbours of the same shape are joined up to `most` points."""
    found: list[Batch] = []
    for batch in batches:
        fits = found and found[-1].n_points + batch.n_points <= most
        both = found[-1].joined(batch) if fits else None
        if both is None:
            found.append(batch)
        else:
            found[-1] = both
    return found


def in_large_batches(split: DataSplit, widest: int) -> DataSplit:
    """The same points; on a GPU in batches as large as memory allows, because small ones leave it waiting for Python.

    `widest` is the largest number of inputs or outputs of a weight.
    """
    fit, validation = (
        merged_batches(some, max((points_at_once(batch, widest) for batch in some), default=0))
        for some in (split.fit, split.validation)
    )
    return replace(split, batches=(*fit, *validation), n_fit_batches=len(fit))


def points_at_once(batch: Batch, widest: int) -> int:
    """How many points like these a GPU takes at once; 0 elsewhere.

    The usual batch size; for tokens possibly more, if the network is so narrow that its outputs are small.
    """
    counts = []
    for inputs in batch.tensors.values():
        if inputs.is_cuda:
            counts.append(points_per_batch(inputs, inputs.device))
            if is_tokens(inputs):
                memory = torch.cuda.get_device_properties(inputs.device).total_memory
                counts[-1] = max(counts[-1], sequences_at_once(inputs.shape[1], widest, memory))
    return min(counts, default=0)


def sequences_at_once(length: int, widest: int, memory: int) -> int:
    """How many sequences of this length pass a block at once on a GPU with `memory` bytes."""
    n_bytes = min(BATCH_BYTES, int(memory * BATCH_MEMORY_SHARE))
    return n_bytes // (N_LAYERS_ALIVE * numerics.SCORE_DTYPE.itemsize * widest * length)
