"""Splits are disjoint, seeded, tied to their data, and never take calibration or holdout items from the test set."""

from pathlib import Path

import torch
from hypothesis import given, settings, strategies as st

from sipp_lab.data.feed import PARTS, Splits, epoch_order, split_images
from sipp_lab.data.folder import FolderIndex
from sipp_lab.data.images import ImageSet
from sipp_lab.data.sets import load_digits


def made(seed: int = 0, content_hash: str = "a") -> Splits:
    return split_images(numbered(100, 20, content_hash), n_calibration=10, n_holdout=30, seed=seed)


def numbered(n_train: int, n_test: int, content_hash: str = "") -> FolderIndex:
    """Data of so many items, of which nothing else is known."""
    n_items = n_train + n_test
    return FolderIndex(Path(), (), ("",) * n_items, torch.zeros(n_items, dtype=torch.int64), n_train, content_hash)


@settings(max_examples=40, deadline=None)
@given(
    n_train=st.integers(3, 300),
    n_test=st.integers(0, 50),
    shares=st.tuples(st.floats(0, 0.45), st.floats(0, 0.45)),
    seed=st.integers(0, 2**32),
)
def test_parts_cover_everything_once(n_train: int, n_test: int, shares: tuple[float, float], seed: int) -> None:
    n_calibration, n_holdout = int(shares[0] * n_train), int(shares[1] * n_train)
    splits = split_images(numbered(n_train, n_test), n_calibration=n_calibration, n_holdout=n_holdout, seed=seed)
    assert len(splits.calibration) == n_calibration and len(splits.holdout) == n_holdout
    together = torch.cat([getattr(splits, part) for part in PARTS]).sort().values
    assert torch.equal(together, torch.arange(n_train + n_test))
    assert torch.equal(splits.test, torch.arange(n_train, n_train + n_test))


def test_the_seed_and_the_content_name_the_splits() -> None:
    assert made().digest == made().digest
    assert len({made().digest, made(seed=1).digest, made(content_hash="b").digest}) == 3
    assert not torch.equal(made().holdout, made(seed=1).holdout)
    other = split_images(numbered(100, 20, "a"), n_calibration=11, n_holdout=29, seed=0)  # other parts
    assert other.digest != made().digest


def is_uniform_choice(draw_holdout) -> bool:
    """Whether every item of 0 .. 99 is equally often among the 30 of `draw_holdout(seed)`: chi-square, 99 degrees."""
    n_draws = 400
    counts = torch.zeros(100, dtype=torch.float64)
    for seed in range(n_draws):
        counts[draw_holdout(seed)] += 1
    expected = n_draws * 0.3
    statistic = ((counts - expected) ** 2 / (expected * 0.7)).sum() * 99 / 100
    return bool(statistic < 180)  # beyond 180 with probability 1e-6


def test_holdout_is_a_uniform_choice() -> None:
    assert is_uniform_choice(lambda seed: made(seed).holdout)
    assert not is_uniform_choice(lambda seed: torch.arange(30))  # not random
    assert not is_uniform_choice(lambda seed: (made(seed).holdout * 0.9).long().unique())  # leans to small numbers


def test_epoch_order_is_a_function_of_seed_and_epoch() -> None:
    items = torch.arange(10, 60)
    first = epoch_order(items, seed=1, epoch=2)
    assert torch.equal(first, epoch_order(items, seed=1, epoch=2))
    assert torch.equal(first.sort().values, items)
    assert not torch.equal(first, epoch_order(items, seed=1, epoch=3))
    assert not torch.equal(first, epoch_order(items, seed=2, epoch=2))


def test_the_content_sees_every_pixel_and_label() -> None:
    images, labels = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    base = ImageSet("x", images, labels, 3, 10).content_hash
    assert base == ImageSet("x", images.clone(), labels.clone(), 3, 10).content_hash
    other_image, other_label = images.clone(), labels.clone()
    other_image[3, 0, 1, 1] = 1
    other_label[3] = 1
    hashes = {
        base,
        ImageSet("x", other_image, labels, 3, 10).content_hash,
        ImageSet("x", images, other_label, 3, 10).content_hash,
        ImageSet("x", images, labels, 2, 10).content_hash,
        ImageSet("x", images.view(4, 1, 1, 4), labels, 3, 10).content_hash,
    }
    assert len(hashes) == 5
    strided = images.expand(4, 3, 2, 2)[:, :1]  # not contiguous, same values
    assert ImageSet("x", strided, labels, 3, 10).content_hash == base


def test_digits() -> None:
    data = load_digits()
    assert data.images.shape == (1797, 1, 8, 8) and data.images.dtype == torch.float32
    assert data.images.min() == 0 and data.images.max() == 1
    assert data.n_train == 1437 and data.n_test == 360
    assert sorted(data.labels.unique().tolist()) == list(range(10))
    # No image comes twice, so parts that share no number share no image either.
    assert len(data.images.flatten(1).unique(dim=0)) == 1797
    assert load_digits().content_hash == data.content_hash
    load_digits().images.zero_()  # what one caller does to its own is not met by the next
    assert load_digits().content_hash == data.content_hash
