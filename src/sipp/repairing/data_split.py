"""Splits the calibration points into fit, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from sipp.errors import DataError
from sipp.inputs import Batch, Data, outputs
from sipp.results import SeenInputs, numerics

# Of every ten points, one at a random place is held back from the fit: data that repeats, say with one point of each
# class in turn, must not lose one class. Half of these are for validation: they leave layers alone and
# stop the polish. The other half only tests the result. If that half is too small, all are for validation.
HELD_BACK_ONE_IN = 10
FEWEST_TEST_POINTS = 4
FEWEST_REPAIR_POINTS = 10
FIT, VALIDATION, TEST, COPY = range(4)

# On a GPU, a batch of tokens takes at most this number of bytes in a pass, and this share of the card's memory. Each
# token keeps the outputs of about four layers alive, the one that is needed and those around it.
BATCH_BYTES, BATCH_MEMORY_SHARE, N_LAYERS_ALIVE = 2 << 30, 1 / 64, 4


@dataclass(frozen=True)
class DataSplit:
    """The calibration points: batches to fit, batches to validate on, and test batches, which choose nothing."""

    batches: Sequence[Batch]  # those to fit first, then those to validate on
    n_fit_batches: int
    test: tuple[Batch, ...]  # not in `batches`
    seen: SeenInputs  # all points, which choose the repair or test it

    @property
    def fit(self) -> list[Batch]:
        return [self.batches[i] for i in range(self.n_fit_batches)]

    @property
    def validation(self) -> list[Batch]:
        return [self.batches[i] for i in range(self.n_fit_batches, len(self.batches))]

    def test_error(self, dense: nn.Module, other: nn.Module) -> float | None:
        """The error of the output on the test points; None if there are none."""
        return outputs.output_error(dense, other, self.test) if self.test else None


def split_data(data: Data) -> DataSplit:
    """The split of these points, which are read once; held-back points get batches of their own."""
    batches = [batch.copied() for batch in data.batches()]
    hashes = [found for batch in batches for found in batch.hashes()]
    role_of = dict.fromkeys(hashes, FIT)
    different, n_different, n_points = list(role_of), len(role_of), len(hashes)
    if n_different < FEWEST_REPAIR_POINTS:  # validation on copies of fit points proves nothing
        copies = "" if n_different == n_points else " different"
        raise DataError(
            f"calibration holds {n_different}{copies} inputs", fix=f"give a repair at least {FEWEST_REPAIR_POINTS}"
        )
    generator = torch.Generator("cpu").manual_seed(0)
    starts = torch.arange(0, n_different, HELD_BACK_ONE_IN, dtype=torch.int64, device="cpu")
    places = torch.randint(HELD_BACK_ONE_IN, (len(starts),), generator=generator, dtype=torch.int64, device="cpu")
    held_back = (starts + places)[starts + places < n_different]
    n_test = len(held_back) // 2
    for i, number in enumerate(held_back.tolist()):
        role_of[different[number]] = TEST if i % 2 and n_test >= FEWEST_TEST_POINTS else VALIDATION
    role_N = torch.zeros(n_points, dtype=torch.int64, device="cpu")
    for i, point in enumerate(hashes):
        role_N[i] = role_of[point]
        if role_of[point] != FIT:  # its copies are left out: none was fitted, and each held-back point counts once
            role_of[point] = COPY
    roles, found = role_N.split([batch.n_points for batch in batches]), list[list[Batch]]()
    for role in (FIT, VALIDATION, TEST):
        parts = [(batch, (role_B == role).nonzero().flatten()) for batch, role_B in zip(batches, roles)]
        found.append([batch.at(at) for batch, at in parts if len(at)])
    most = max(batch.n_points for batch in batches)
    fit, validation, test = found[0], merged_batches(found[1], most), merged_batches(found[2], most)
    return DataSplit((*fit, *validation), len(fit), tuple(test), SeenInputs(frozenset(hashes), is_all=True))


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
            counts.append(numerics.points_per_batch(inputs, inputs.device))
            if numerics.is_tokens(inputs):
                memory = torch.cuda.get_device_properties(inputs.device).total_memory
                counts[-1] = max(counts[-1], sequences_at_once(inputs.shape[1], widest, memory))
    return min(counts, default=0)


def sequences_at_once(length: int, widest: int, memory: int) -> int:
    """How many sequences of this length pass a block at once on a GPU with `memory` bytes."""
    n_bytes = min(BATCH_BYTES, int(memory * BATCH_MEMORY_SHARE))
    return n_bytes // (N_LAYERS_ALIVE * numerics.SCORE_DTYPE.itemsize * widest * length)
