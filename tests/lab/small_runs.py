"""Small recipes for tests of runs, what a run left behind, and runs that are killed again and again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sipp_lab.recipes import Recipe, load_recipe
from sipp_lab.runs import stages
from sipp_lab.runs.folder import FINAL, load_checkpoint, load_state, read_records
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import FinishedRun, run

SMALL = (
    "train.epochs=2", "train.decay={factor: 0.5, milestones: [1]}", "train.batch_size=256", "data.n_calibration=40",
    "prune.alpha=0.5", "prune.levels=2",
)  # fmt: skip
# A rate so small that no weight moves: what a network was pruned from then shows in its final weights.
STILL = "train.rate=1.0e-30"
Tensors = dict[str, Tensor]


class Killed(BaseException):
    """Stands for a process that is killed."""


def small(name: str, *settings: str) -> Recipe:
    return load_recipe(name, settings=(*SMALL, *settings))


def final(folder: Path, stage: str) -> Tensors:
    """The trained network of a stage."""
    return load_state(folder / stage / FINAL)[0]


def saved(folder: Path) -> dict[str, Tensors]:
    """{stage: its trained network} of a run."""
    return {path.parent.name: final(folder, path.parent.name) for path in sorted(folder.glob(f"*/{FINAL}"))}


def equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def contents(folder: Path) -> list[Any]:
    """All that a run left behind: the names of its files, its networks, and the records without their clock."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    raw = [
        (name, key, tensor.dtype, tensor.flatten().view(torch.uint8).tolist())
        for name, tensors in saved(folder).items()
        for key, tensor in sorted(tensors.items())
    ]
    return [*names, *raw, *({**record, "seconds": 0} for record in read_records(folder))]


def killed_at_every_checkpoint(
    recipe: Recipe, out: Path, patch: pytest.MonkeyPatch, look: Callable[[dict[str, Any]], None]
) -> FinishedRun:
    """Runs the recipe, killed after every checkpoint and begun again; `look` sees what was saved last."""
    save, n_saved = stages.save_checkpoint, 0

    def dying(path: Path, values: dict[str, Any]) -> None:
        nonlocal n_saved
        save(path, values)
        n_saved += 1
        look(load_checkpoint(path))
        raise Killed

    patch.setattr(stages, "save_checkpoint", dying)
    while True:
        try:
            how = RunOptions(out=out, device="cpu", accept_changes=True)
            return run(recipe, how, checkpoint_seconds=0.0)
        except Killed:
            assert n_saved < 1000
