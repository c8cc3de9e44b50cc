"""A detector with the shape of a YOLO goes the whole way: prune, repair, train on, store, shrink, run, export.

Its stages read earlier ones by number, its blocks split and concatenate. Its head returns a tuple of a tensor and a
dict in eval mode and a dict in training, keeps its grid from one call to the next, and has a frozen layer of constants.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp

N_BINS, N_CLASSES = 4, 3
FIXED = "*lengths*"


def conv(n_in: int, n_out: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    layer = nn.Conv2d(n_in, n_out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(n_out), nn.SiLU())


class Split(nn.Module):
    """Half of the channels pass through a residual block; both halves and its output are read together."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.half = n_out // 2
        self.first, self.last = conv(n_in, n_out, 1), conv(3 * self.half, n_out, 1)
        self.inner = nn.Sequential(conv(self.half, self.half), conv(self.half, self.half))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        parts.append(parts[-1] + self.inner(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Lengths(nn.Module):
    """The mean of a distribution over lengths 0, 1, ..., as a convolution with constants."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(N_BINS, 1, 1, bias=False).requires_grad_(False)
        self.conv.weight.data.copy_(torch.arange(N_BINS).view(1, N_BINS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        n, _, places = x.shape
        return self.conv(x.view(n, 4, N_BINS, places).transpose(2, 1).softmax(1)).view(n, 4, places)


class Head(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.boxes = nn.ModuleList(nn.Sequential(conv(n, 8), nn.Conv2d(8, 4 * N_BINS, 1)) for n in widths)
        self.scores = nn.ModuleList(
            nn.Sequential(conv(n, n, groups=n), conv(n, 8, 1), nn.Conv2d(8, N_CLASSES, 1)) for n in widths
        )
        self.lengths = Lengths()
        self.grid, self.shape = torch.empty(0), torch.Size()

    def forward(self, maps: list[Tensor]) -> Any:
        boxes = torch.cat([f(x).flatten(2) for f, x in zip(self.boxes, maps)], -1)
        scores = torch.cat([f(x).flatten(2) for f, x in zip(self.scores, maps)], -1)
        raw = {"boxes": boxes, "scores": scores, "maps": maps}
        if self.training:
            return raw
        if self.shape != maps[0].shape:
            self.shape = maps[0].shape
            grids = [torch.cartesian_prod(*map(torch.arange, x.shape[2:])).T for x in maps]
            self.grid = torch.cat(grids, 1).to(boxes.dtype) + 0.5
        near, far = self.lengths(boxes).chunk(2, 1)
        corners = torch.cat((self.grid - near, self.grid + far), 1)
        return torch.cat((8 * corners, scores.sigmoid()), 1), raw


class Detector(nn.Module):
    """Stages, each of which reads the one before or those named beside it."""

    def __init__(self) -> None:
        super().__init__()
        up = nn.Upsample(scale_factor=2)
        stages = [conv(3, 8, 3, 2), Split(8, 8), conv(8, 16, 3, 2), Split(16, 16), up, Split(24, 8), Head(8, 16)]
        self.stages, self.reads = nn.ModuleList(stages), {5: (4, 1), 6: (5, 3)}

    def forward(self, x: Tensor) -> Any:
        done: list[Any] = []
        for i, stage in enumerate(self.stages):
            last = done[-1] if done else x
            read = [done[j] for j in self.reads.get(i, ())]
            done.append(stage(torch.cat(read, 1) if i == 5 else read or last))
        return done[-1]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    net = Detector()
    with torch.no_grad():
        for _ in range(20):
            net(torch.rand(32, 3, 16, 16))  # its norms see data
    return net.eval()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(120, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def same(a: Any, b: Any, atol: float = 1e-4) -> bool:
    """Whether two outputs have one structure and the same numbers, up to rounding."""
    if isinstance(a, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, atol=atol)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], atol) for key in a)
    return type(a) is type(b) and len(a) == len(b) and all(same(x, y, atol) for x, y in zip(a, b))


def test_it_is_pruned_repaired_certified_and_stored(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="frozen.*lengths"):
        sipp.prune(model, images, keep=0.5, method="sipp-det", progress=False)
    pruned = sipp.prune(model, images, keep=0.5, method="magnitude", exclude=FIXED, progress=False)
    repaired = sipp.prune(model, images, keep=0.5, exclude=FIXED, repair=True, progress=False)
    convolutions = [name for name, one in model.named_modules() if isinstance(one, nn.Conv2d) and "lengths" not in name]
    assert [layer.name for layer in repaired.layers] == [f"{name}.weight" for name in convolutions]
    assert torch.equal(repaired.model.stages[6].lengths.conv.weight, model.stages[6].lengths.conv.weight)

    def error(net: nn.Module) -> float:
        with torch.no_grad():
            return float((net(images)[1]["scores"] - model(images)[1]["scores"]).norm())

    assert error(repaired.model) < 0.8 * error(pruned.model)
    new = torch.rand(100, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    of_scores = sipp.certify(model, repaired, new, output=lambda out: out[0][:, 4:], progress=False)
    of_all = sipp.certify(model, repaired, new, output=0, progress=False)
    assert of_scores.epsilon > of_all.epsilon  # coordinates are large, and most of them are the grid
    sipp.save(repaired, tmp_path / "net.safetensors")
    assert same(sipp.load(tmp_path / "net.safetensors", into=Detector())(new), repaired.model(new), atol=0)


def test_zeros_stay_in_the_network_and_in_its_average(model: nn.Module, images: Tensor) -> None:
    """As in the trainer of ultralytics, which makes the average before it calls back, and pickles a copy of it."""
    pruned = sipp.prune(model, None, keep=0.3, method="magnitude", floor=0.1, exclude=FIXED)
    net = copy.deepcopy(pruned.model).train()
    average = copy.deepcopy(net).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    sipp.hold(net, pruned, optimizer=optimizer)
    sipp.hold(average, pruned)
    for _ in range(3):
        optimizer.zero_grad()
        raw = net(images[:16])
        (raw["boxes"].square().mean() + raw["scores"].square().mean()).backward()
        optimizer.step()
        for mine, theirs in zip(average.state_dict().values(), net.state_dict().values()):
            if mine.is_floating_point():
                mine.mul_(0.5).add_(theirs, alpha=0.5)
    stored = pickle.loads(pickle.dumps(copy.deepcopy(average).half()))
    sipp.release(stored)
    assert b"sipp" not in pickle.dumps(stored)  # what is released is stored without a trace of the masks
    for one in (net, average, stored):
        assert all((one.get_parameter(name)[~mask] == 0).all() for name, mask in pruned.masks.items())
        assert not torch.equal(one.stages[0][0].weight.float(), pruned.model.stages[0][0].weight)


def test_it_is_shrunk(model: nn.Module, images: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none says that the excluded layer would be pruned
        small = sipp.shrink(model, images, multiply_adds=0.7, exclude=FIXED, progress=False)
    assert small.multiply_adds <= 0.7 * small.multiply_adds_before
    decoded, raw = small.model(images[:2])
    assert torch.equal(small.model.stages[6].lengths.conv.weight, model.stages[6].lengths.conv.weight)
    assert decoded.shape == (2, 4 + N_CLASSES, 80) and raw["boxes"].shape == (2, 4 * N_BINS, 80)
    small.model.train()(images[:4])["scores"].sum().backward()


def test_it_runs_without_its_zeros_and_is_exported(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    pruned = sipp.prune(model, None, keep=0.2, method="magnitude", floor=0.1, exclude=FIXED)
    x = images[:4]
    wanted = pruned.model(x)
    assert same(sipp.sparse(pruned, x, always=True)(x), wanted)
    assert same(sipp.shrink(pruned, x).model(x), wanted)
    if all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript")):
        sipp.export(pruned, tmp_path / "net.onnx", x)
        assert (tmp_path / "net.onnx").stat().st_size > 0
