"""One network that reaches nearly every compiled loop, pruned and scored in many ways. Run in processes of their own.

`python many_ways.py caches FOLDER` prints a digest of every result as JSON, by the state that the cache in FOLDER was
in and by threads and splits of the data; `python many_ways.py FILE max mean` saves these scores instead.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path

import numba
import torch
from torch import Tensor, nn

import sipp


class SideBySide(nn.Module):
    """Layers that all see the data itself: no forward pass of another layer can round differently before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.few = nn.Conv2d(6, 3, 3, padding=1)  # 121 patches of a point: more than a block
        self.many = nn.Conv2d(6, 40, 3, stride=2)  # 25 of them: several points in a block
        self.grouped = nn.Conv2d(6, 12, 3, stride=3, groups=3)
        self.pointwise = nn.Conv2d(6, 70, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.lines = nn.Linear(6 * 11 * 11, 9)
        self.twice = nn.Linear(11, 5)  # used twice for a point

    def forward(self, x: Tensor) -> Tensor:
        images = [layer(x) for layer in (self.few, self.many, self.grouped, self.pointwise, self.depthwise)]
        lines = [self.lines(x.flatten(1)), self.twice(x), self.twice(-x)]
        return torch.cat([out.flatten(1) for out in (*images, *lines)], 1)


def points() -> Tensor:
    """Six points of both signs: one has no negative value, one spans more than float32 holds."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 6, 11, 11, generator=generator)
    x[1].abs_()
    x[2] *= torch.exp2(140 * torch.rand(6, 11, 11, generator=generator) - 130)
    return x


def digest(tensors: dict[str, Tensor]) -> str:
    joined = hashlib.sha256()
    for name in sorted(tensors):
        joined.update(tensors[name].detach().contiguous().numpy().tobytes())
    return joined.hexdigest()


def results(n_threads: int, batches: list[Tensor]) -> dict[str, str]:
    """A digest of scores and of whole prunings."""
    torch.set_num_threads(n_threads)
    net, found = SideBySide(), {}
    for reduce in ("max", "mean"):
        found[reduce] = digest(sipp.sensitivity(net, batches, reduce=reduce))
    for method, draws in (("sipp-hybrid", "until"), ("sipp-rand", "fixed"), ("sipp-det", "until")):
        pruned = sipp.prune(net, batches, keep=0.3, method=method, draws=draws, seed=3)
        found[f"{method} {draws}"] = digest(pruned.model.state_dict())
    return found


def ways(are_all: bool) -> dict[str, dict[str, str]]:
    """The results of threads and splits, which should change none of them."""
    x = points()
    found = {"2 threads, whole": results(2, [x])}
    if are_all:
        found["1 thread, one by one"] = results(1, list(x.split(1)))
        found["2 threads, 4 + 2"] = results(2, [x[:4], x[4:]])
    return found


def forked(are_all: bool = False) -> dict[str, dict[str, str]]:
    """The results in a process of its own, which loads or compiles every loop."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(ways(are_all)))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, "a process failed"
    return json.loads(text)  # type: ignore[no-any-return]


def functions_in(cache: Path) -> list[Path]:
    """The index of every compiled function; what it indexes has the same name and another ending."""
    return sorted(cache.rglob("*.nbi"))


def caches(cache: Path) -> dict[str, object]:
    """The results from an empty cache and from a full one."""
    # what every process needs, once before they are forked: the modules, and Numba's own tables, for a function that
    # is compiled and not kept; each loads or compiles the loops themselves
    importlib.import_module("sipp.scoring.kernels.cpu")
    assert sipp.prune and sipp.sensitivity and numba.njit(lambda x: x)(1.0)
    assert not functions_in(cache)
    found: dict[str, object] = {"cold": forked(), "warm": forked(are_all=True)}
    found["n"] = len(functions_in(cache))
    return found


def scores(*reduces: str) -> dict[str, Tensor]:
    """The scores themselves, `max` or `mean`."""
    by_reduce = {reduce: sipp.sensitivity(SideBySide(), [points()], reduce=reduce) for reduce in reduces}
    return {f"{reduce} {name}": score for reduce, each in by_reduce.items() for name, score in each.items()}


if __name__ == "__main__":
    if sys.argv[1] == "caches":
        print(json.dumps(caches(Path(sys.argv[2]))))
    else:
        torch.save(scores(*sys.argv[2:]), sys.argv[1])
