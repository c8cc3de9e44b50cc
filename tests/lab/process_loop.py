"""Several processes on this machine (gloo), forked from one parent; prints one line of JSON with what was found.

python tests/lab/process_loop.py FOLDER
"""

import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sipp.errors import DataError
from sipp.progress import progress_bar
from sipp.verbs.prune import prune
from sipp_lab.data.feed import Feed, split_images
from sipp_lab.data.sets import load_digits
from sipp_lab.nets import plain
from sipp_lab.processes import from_leader, join_processes, n_processes, rank
from sipp_lab.recipes import load_recipe
from sipp_lab.runs import running
from sipp_lab.runs.folder import load_state, read_records
from sipp_lab.runs.options import RunOptions
from sipp_lab.training import TrainState, new_state, set_masks, train

plain.DIGITS_WIDTHS = (4, 8, 8)  # its size decides nothing here
SETTINGS = (
    "train.epochs=2",
    "train.decay={factor: 0.5, milestones: [1]}",
    "train.batch_size=209",  # 837 = 4 * 209 + 1: the last batch has one item, so one process has none
    "prune.methods=[sipp-hybrid, snip]",
    "prune.levels=1",
    "data.n_calibration=60",
)


def spawn(count: int, acts: Sequence[Callable[[], object]], folder: Path) -> list[list[dict[str, Any]]]:
    """What the acts gave in each of `count` processes: {"value": ..}, {"error": ..}, or {"status": ..} if it died."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True)
    pids = []
    for index in range(count):
        pid = os.fork()
        if not pid:
            place = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
            torch.set_num_threads(1)
            try:
                join_processes(cpu=True)
                torch.save(_done(acts), folder / f"{index}.pt")
            finally:
                os._exit(0)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    return [
        torch.load(folder / f"{i}.pt") if (folder / f"{i}.pt").exists() else [{"status": status}]
        for i, status in enumerate(statuses)
    ]


def _done(acts: Sequence[Callable[[], object]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for act in acts:
        try:
            found.append({"value": act()})
        except BaseException as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
    return found


def failing() -> int:
    """Raises in every process, because the leader finds NaN in its data."""

    def look() -> int:
        raise DataError("it is NaN", where="batch 3")

    return from_leader(look)


def trained() -> list[torch.Tensor]:
    """The weights and masks of a network without BatchNorm after an epoch whose last batch is too short for all.

    After two steps the smaller half of the weights goes.
    """
    data = load_digits()
    feed = Feed(data, split_images(data, n_calibration=200, n_holdout=400), torch.device("cpu"))
    recipe = load_recipe(
        "digits-at-init", settings=("train.epochs=1", "train.warmup_epochs=0.0", "train.decay.every=1")
    )
    hyper = recipe.train.model_copy(update={"batch_size": 209, "rate": 0.1, "weight_decay": 0.0, "augment": True})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    seeds = set[int]()

    def half(n_done: int, state: TrainState) -> None:
        seeds.add(torch.initial_seed())
        if n_done == 2:
            weight = net[1].weight.detach().abs()
            set_masks(state, {"1.weight": weight > weight.median()})

    state = train(new_state(net, hyper), feed, hyper, seed=0, after_step=half)
    SEEDS[:] = seeds
    rows = [torch.tensor([row.train_loss, row.train_top1]) for row in state.rows]
    return [parameter.detach().clone() for parameter in net.parameters()] + rows + [state.masks["1.weight"]]


SEEDS: list[int] = []  # of the steps of `trained`: of dropout


def whole_run(out: Path, *, name: str = "digits-at-init", dies_in: str = "") -> int:
    """The networks made; the last process kills itself when it trains its first, or its second network."""
    if dies_in:
        import sipp_lab.runs.stages as stages

        original = stages.train

        def dying(*arguments: Any, **options: Any) -> Any:
            if rank() == n_processes() - 1 and (out / "begun").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            state = original(*arguments, **options)
            (out / "begun").touch()
            return state

        stages.train = dying
        if dies_in == "first":
            out.mkdir(parents=True, exist_ok=True)
            (out / "begun").touch()

    def bar(title: str, total: int, *, shown: bool) -> Any:
        assert shown == (rank() == 0)  # one bar for all processes
        return progress_bar(title, total, shown=False)

    running.progress_bar = bar
    recipe = load_recipe(name, settings=SETTINGS)
    return running.run(recipe, RunOptions(out=out, device="cpu", accept_changes=True), progress=True).n_made


def results(out: Path) -> tuple[dict[str, dict[str, torch.Tensor]], list[Any]]:
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    finals = {path.parent.name: load_state(path)[0] for path in sorted(folder.glob("*/final.safetensors"))}
    return finals, read_records(folder)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    load_digits()
    torch.set_num_threads(1)  # a child cannot use threads that its parent has started
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports what every optimizer does, once for all
    prune(nn.Linear(40, 30), torch.rand(9, 40), keep=0.5, method="sipp-hybrid")  # loads what is compiled, once for all
    found: dict[str, Any] = {}
    (alone,) = spawn(1, [trained, lambda: whole_run(folder / "one")], folder / "a")
    found["nan"], pair, seeds, found["made"], found["made again"] = zip(
        *spawn(
            2,
            [
                failing,
                trained,
                lambda: SEEDS,
                *(lambda: whole_run(folder / "two"),) * 2,
            ],
            folder / "b",
        )
    )
    found["same training"] = all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7) for one in pair for a, b in zip(one["value"], alone[0]["value"])
    )
    found["n_seeds"] = [len({*seeds[0]["value"], *seeds[1]["value"]}), len(seeds[0]["value"])]
    (one, one_records), (two, two_records) = results(folder / "one"), results(folder / "two")
    masks = [(stage, key) for stage in one for key in one[stage] if key.startswith("mask.")]
    found["n_masks"] = len(masks)
    found["same masks"] = all(torch.equal(one[stage][key], two[stage][key]) for stage, key in masks)
    found["same start"] = [r.get("before") for r in one_records] == [r.get("before") for r in two_records]
    gradual = "digits-gradual"  # BatchNorm's statistics differ between processes until a cut
    (found["gradual"],) = zip(*spawn(2, [lambda: whole_run(folder / "cuts", name=gradual)], folder / "c"))
    found["gradual keeps"] = [record.get("keep", 1.0) for record in results(folder / "cuts")[1]]
    died = spawn(2, [lambda: whole_run(folder / "three", dies_in="first")], folder / "d")
    found["died"] = [last for (last,) in died]
    found["published"] = len(results(folder / "three")[0])
    spawn(2, [lambda: whole_run(folder / "parts", dies_in="second")], folder / "e")
    found["left by the dead"] = len(results(folder / "parts")[0])
    spawn(2, [lambda: whole_run(folder / "parts")], folder / "f")
    parts = results(folder / "parts")[0]
    found["resumed the same"] = all(torch.equal(two[s][k], parts[s][k]) for s in two for k in two[s])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
