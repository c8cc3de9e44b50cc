"""The 1,797 handwritten 8 x 8 digits that come with scikit-learn: real data without a download."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sipp.extras import needed_for
from sipp_lab.data.imageset import ImageSet

MAX_GREY = 16.0  # pixels are counts of dark pixels in 4 x 4 blocks
N_CLASSES = 10
N_TEST = 360
TEST_SEED = 20  # independent of the split's seed: the test set is the same in every experiment


def load_digits() -> ImageSet:
    """All digits as float32 in [0, 1], N x 1 x 8 x 8; a fixed random sample of 360 is the test set."""
    with needed_for("the digits data set"):
        from sklearn.datasets import load_digits as embedded  # imported here: it takes a second

    images, labels = _read(embedded)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(TEST_SEED))
    n_train = len(images) - N_TEST
    return ImageSet("digits", images[order].contiguous(), labels[order].contiguous(), n_train, N_CLASSES)


@functools.cache  # parsing the text file takes longer than an epoch of a small network
def _read(embedded: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """Images and labels in their original order; callers must copy them."""
    source = embedded()
    images = torch.from_numpy(source.images / MAX_GREY).to(torch.float32).unsqueeze(1)
    return images, torch.from_numpy(source.target).to(torch.int64)
