"""Image folders: order and labels, the two crops, worker processes, and files that are broken."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sipp.errors import DataError
from sipp_lab.data import folder as module
from sipp_lab.data.feed import split_images
from sipp_lab.data.folder import (
    Crop,
    FolderIndex,
    centre_crop,
    draw_crop,
    index_folders,
)


def coded_image(width: int, height: int) -> Image.Image:
    """Red grows with x and green with y, from 0 to 255: a crop tells where it was taken."""
    x = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    y = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(np.stack([x, y, np.zeros_like(x)], axis=2).astype(np.uint8))


def make_folders(root: Path, n_train: int = 3, n_val: int = 2) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", n_train), ("val", n_val)):
        for name in ("cat", "ant"):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                width, height = (int(n) for n in rng.integers(40, 90, 2))
                coded_image(width, height).save(root / part / name / f"{i}.{'JPEG' if i else 'png'}")
    (root / "train" / "cat" / "notes.txt").write_text("not an image")
    return root


def batches(index: FolderIndex, items: torch.Tensor, **changes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return index.batches(items.split(2), **{"augment": (0, 0), "n_workers": 0, **changes})


def test_index(tmp_path: Path) -> None:
    index = index_folders(make_folders(tmp_path))
    assert index.classes == ("ant", "cat") and index.n_train == 6 and len(index.paths) == 10
    assert index.paths[:3] == ("train/ant/0.png", "train/ant/1.JPEG", "train/ant/2.JPEG")
    assert index.paths[-1] == "val/cat/1.JPEG"
    assert index.labels.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    splits = split_images(index, n_calibration=1, n_holdout=2, seed=0)
    assert all(index.paths[i].startswith("val/") for i in splits.test)
    before = index.content_hash
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"other size")
    assert index_folders(tmp_path).content_hash != before


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train is not a folder"):
        index_folders(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="no class folders"):
        index_folders(tmp_path)
    (tmp_path / "train" / "ant").mkdir()
    with pytest.raises(DataError, match="ant contains no images"):
        index_folders(tmp_path)
    coded_image(9, 9).save(tmp_path / "train" / "ant" / "a.png")
    with pytest.raises(DataError, match=r"ant is missing"):
        index_folders(tmp_path)
    (tmp_path / "val" / "bee").mkdir()
    with pytest.raises(DataError, match="classes that train/ does not have: bee"):
        index_folders(tmp_path)


def test_batches_keep_the_order_and_hold_every_item(tmp_path: Path) -> None:
    index = index_folders(make_folders(tmp_path))
    items = torch.tensor([9, 0, 4, 1, 7])
    out = list(batches(index, items, augment=None))
    assert len(out) == 3
    assert [len(labels) for _, labels in out] == [2, 2, 1]
    assert torch.cat([labels for _, labels in out]).tolist() == index.labels[items].tolist()
    images = torch.cat([images for images, _ in out])
    assert images.shape == (5, 3, 224, 224) and images.dtype == torch.uint8
    for i, item in enumerate(items.tolist()):
        expected = np.array(centre_crop(Image.open(tmp_path / index.paths[item]).convert("RGB")))
        assert np.array_equal(images[i].permute(1, 2, 0).numpy(), expected)


def test_workers_and_order_change_nothing_seed_and_epoch_do(tmp_path: Path) -> None:
    index = index_folders(make_folders(tmp_path))
    items = torch.tensor([3, 1, 5, 0])

    def images(items: torch.Tensor, **changes) -> torch.Tensor:
        return torch.cat([batch for batch, _ in batches(index, items, **changes)])

    alone = images(items)
    assert torch.equal(alone, images(items, n_workers=2))
    assert torch.equal(alone, images(items.flip(0)).flip(0))
    assert not torch.equal(alone, images(items, augment=(0, 1)))
    assert not torch.equal(alone, images(items, augment=(1, 0)))
    shares = [images(items, share=(rank, 2)) for rank in (0, 1)]
    assert torch.equal(alone[::2], shares[0]) and torch.equal(alone[1::2], shares[1])


@pytest.mark.parametrize(("damage", "n_workers"), [("cut", 0), ("text", 0), ("empty", 0), ("gone", 0), ("cut", 1)])
def test_a_corrupt_image_is_named(tmp_path: Path, damage: str, n_workers: int) -> None:
    index = index_folders(make_folders(tmp_path))
    path = tmp_path / index.paths[4]
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[: len(raw) // 2], "text": b"not an image", "empty": b"", "gone": b""}[damage])
    if damage == "gone":
        path.unlink()
    with pytest.raises(DataError, match=rf"item 4, .*{path.name}: cannot be decoded"):
        list(batches(index, torch.arange(6), n_workers=n_workers))
    assert len(list(batches(index, torch.arange(4), n_workers=n_workers))) == 2  # the others are fine


def test_a_dead_worker_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_folders(make_folders(tmp_path))
    parent = os.getpid()

    def die(path: Path, item: int) -> Image.Image:
        if item == 4:
            assert os.getpid() != parent
            os.kill(os.getpid(), signal.SIGKILL)
        return coded_image(50, 50)

    monkeypatch.setattr(module, "_decode", die)  # worker processes are forked, so they see it
    if torch.multiprocessing.get_start_method() != "fork":
        pytest.skip("needs forked workers")
    before = set(multiprocessing.active_children())  # an earlier test's worker may still be on its way out
    with pytest.raises(DataError, match=r"worker process failed while batch \d of 3"):
        list(batches(index, torch.arange(6), n_workers=1))
    assert set(multiprocessing.active_children()) <= before  # buried: no late signal of its death can come


@pytest.mark.parametrize(("width", "height"), [(640, 480), (49, 49), (30, 500), (333, 111)])
def test_centre_crop(width: int, height: int) -> None:
    out = np.array(centre_crop(coded_image(width, height)))
    assert out.shape == (224, 224, 3)
    # Shorter side to 256, so the crop sees 224 / 256 of it around the middle, and the same length of the other.
    short = min(width, height)
    for axis, side in ((0, width), (1, height)):
        line = out[112, :, 0] if axis == 0 else out[:, 112, 1]
        seen = 255 * (223 / 256) * short / (side - 1)  # from the first pixel's middle to the last one's
        assert abs((float(line[0]) + float(line[-1])) / 2 - 127.5) < 2.5
        assert abs(float(line[-1]) - float(line[0]) - seen) < 2.5


def slow_window(width: int, height: int, rng: np.random.Generator) -> Crop:
    """The documented draw, try after try, until one fits (for shapes where that happens within ten tries)."""
    while True:
        area = width * height * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 1 <= w <= width and 1 <= h <= height:
            left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
            return left, top, w, h, bool(rng.integers(2))


def features(windows: list[Crop], width: int, height: int) -> np.ndarray:
    """Per window: width, height, area, ratio, free space on the left and at the top (as shares), mirrored."""
    table = np.array(windows, float)
    left, top, w, h, mirrored = table.T
    place_x, place_y = (left + 0.5) / (width - w + 1), (top + 0.5) / (height - h + 1)
    return np.stack([w, h, w * h, w / h, place_x, place_y, mirrored, place_x * place_y, mirrored * place_x])


@cache
def slow_features(n: int, width: int, height: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return features([slow_window(width, height, rng) for _ in range(n)], width, height)


def is_spread_as_documented(draw, width: int = 300, height: int = 220) -> bool:
    """Whether `draw` and the slow version give the same distribution: two-sample Kolmogorov-Smirnov on each feature."""
    n = 1000
    generator = torch.Generator().manual_seed(0)
    ours = features([draw(width, height, generator) for _ in range(n)], width, height)
    for a, b in zip(ours, slow_features(n, width, height)):
        grid = np.concatenate([a, b])
        gap = np.searchsorted(np.sort(a), grid, "right") - np.searchsorted(np.sort(b), grid, "right")
        if np.abs(gap).max() / n > 2.7 * (2 / n) ** 0.5:  # beyond it with probability 1e-6
            return False
    return True


def test_random_windows_are_spread_as_documented_and_broken_ones_are_seen() -> None:
    assert is_spread_as_documented(draw_crop)

    def broken(change) -> object:
        return lambda width, height, generator: change(*draw_crop(width, height, generator))

    assert not is_spread_as_documented(broken(lambda x, y, w, h, mirrored: (0, y, w, h, mirrored)))
    coupled = broken(lambda x, y, w, h, mirrored: (x, y, w, h, x > (300 - w) / 2))  # the right share
    assert not is_spread_as_documented(coupled)


@pytest.mark.parametrize(("width", "height"), [(1000, 10), (10, 1000), (1, 1), (2, 3), (640, 480)])
def test_random_windows_lie_within_the_image(width: int, height: int) -> None:
    for seed in range(50):
        left, top, w, h, _ = draw_crop(width, height, torch.Generator().manual_seed(seed))
        assert 0 <= left < left + w <= width and 0 <= top < top + h <= height


def test_train_mode_sees_the_drawn_window(tmp_path: Path) -> None:
    index = index_folders(make_folders(tmp_path))
    images = torch.cat([images for images, _ in batches(index, torch.arange(6))])
    assert images.shape == (6, 3, 224, 224) and images.dtype == torch.uint8
    red, green = images[:, 0].float(), images[:, 1].float()
    # In a crop of a coded image red changes along x only and green along y only.
    assert (red.std(dim=1).mean() < 6) and (red.std(dim=2).mean() > 20)
    assert (green.std(dim=2).mean() < 6) and (green.std(dim=1).mean() > 20)
