"""Splits the calibration points into fit, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from sipp.errors import DataError
from sipp.inputs import Batch, Data, merged_batches, outputs, split_off
from sipp.results import SeenInputs, numerics, words

# Of every ten points, one is held back from the fit. Half of these are for validation: they leave layers alone and stop
# the polish. The other half only tests the result. If that half is too small, all are for validation.
HELD_BACK_ONE_IN = 10
FEWEST_TEST_POINTS = 4
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
    batches = [replace(batch.copied(), labels=None) for batch in data.batches()]
    hashes = [found for batch in batches for found in batch.hashes()]
    n_different = len(set(hashes))
    if n_different < FEWEST_REPAIR_POINTS:  # validation on copies of fit points proves nothing
        copies = "" if n_different == len(hashes) else "different "
        raise DataError(
            f"calibration holds {words.counted(n_different, f'{copies}input')}",
            fix=f"give a repair at least {FEWEST_REPAIR_POINTS}",
        )
    fit, held_back = split_off(batches, HELD_BACK_ONE_IN)
    n_test = sum(batch.n_points for batch in held_back) // 2
    validation, test = _every_other(held_back) if n_test >= FEWEST_TEST_POINTS else (held_back, [])
    most = max(batch.n_points for batch in batches)
    validation, test = merged_batches(validation, most), merged_batches(test, most)
    return DataSplit((*fit, *validation), len(fit), tuple(test), SeenInputs(frozenset(hashes), is_all=True))


def _every_other(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """The first, the third, the fifth of all points and so on, and those between them."""
    parts: tuple[list[Batch], list[Batch]] = [], []
    start = 0
    for batch in batches:
        for i, part in enumerate(parts):
            at = numerics.integers((start + i) % 2, batch.n_points, 2)
            if len(at):
                part.append(batch.at(at))
        start += batch.n_points
    return parts


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
