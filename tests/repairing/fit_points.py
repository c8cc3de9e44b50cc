"""Which points a repair fits, validates on and tests on: of every ten it holds back one."""

import torch
from torch import Tensor

from sipp.inputs.data import data_of
from sipp.repairing.data_split import split_batches


def split_positions(n: int) -> tuple[list[int], list[int], list[int]]:
    """The numbers of the fit, validation and test points among n different ones."""
    split = split_batches(data_of(torch.arange(float(n))[:, None]).batches())
    parts = (split.fit, split.validation, split.test)
    fit, validation, test = ([int(x) for batch in part for x in batch.args[0].flatten()] for part in parts)
    return fit, validation, test


def fit_points(points: Tensor) -> Tensor:
    return points[split_positions(len(points))[0]]
