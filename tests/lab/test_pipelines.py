"""Both pipelines: the ladder, shared parents, masks that only shrink, records, stopping and going on."""

import os
import signal
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.small_runs import STILL, contents, saved, small
from torch import Tensor, nn

from sipp.errors import DataError, OptionError
from sipp.pruning.cutting import cut
from sipp.pruning.ranking import only_alive, rank
from sipp.results.options import PruneOptions
from sipp.scoring.task import task_of
from sipp_lab.pipelines.shared import next_budget
from sipp_lab.recipes import config_of
from sipp_lab.runs import train_networks
from sipp_lab.runs.plan import plan
from sipp_lab.runs.reading import list_runs, read_run
from sipp_lab.runs.run_recipe import Progress, run
from sipp_lab.runs.store import read_records, run_name, step_name
from sipp_lab.training import loop
from sipp_lab.training.loop import TrainState
from sipp_lab.training.signals import Interrupted

pytestmark = pytest.mark.usefixtures("narrow")

METHODS = "prune.methods=[sipp-det, sipp-hybrid, magnitude, random]"


def weights_of(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (weight, mask)} of the prunable weights."""
    names = [key.removeprefix("mask.") for key in tensors if key.startswith("mask.")]
    return {name: (tensors[f"model.{name}"], tensors[f"mask.{name}"]) for name in names}


@pytest.mark.parametrize("pipeline", ["iterative", "at-init"])
def test_ladder_parents_and_masks(pipeline: str, tmp_path: Path) -> None:
    recipe = small(f"digits-{pipeline}", METHODS, STILL)
    done = run(recipe, out=tmp_path, device="cpu")
    found = saved(done.folder)
    dense = found["seed0.dense"]
    assert len(found) == len(done.records) == done.n_made == 1 + 4 * 2 == len(plan(recipe))
    by_unit = {(record["method"], record["level"]): record for record in done.records}
    for method in recipe.prune.methods:
        left = 980
        for level in (1, 2):
            record = by_unit[method, level]
            weights = weights_of(found[f"seed0.{method}.{level:02d}"])
            n_kept = sum(int(mask.sum()) for _, mask in weights.values())
            pruned = record["pruned"]
            assert pruned["budget"] == next_budget(left, 0.5) == pruned["kept"] == n_kept
            assert record["keep"] == n_kept / 980
            for layer in pruned["layers"]:
                weight, mask = weights[layer["name"]]
                assert not bool(weight[~mask].any())
                assert layer["kept"] == int(mask.sum())
                assert record["nonzero"][layer["name"]] == int(weight.count_nonzero()) <= layer["kept"]
                assert layer["dead_rows"] == int((~mask.flatten(1).any(1)).sum())
                if method != "sipp-hybrid":  # sampling re-weights
                    assert torch.equal(weight, torch.where(mask, dense[f"model.{layer['name']}"], 0.0))
                if pipeline == "iterative" and level == 2:
                    above = weights_of(found[f"seed0.{method}.01"])[layer["name"]][1]
                    assert not bool((mask & ~above).any())
            left = pruned["kept"]


def test_mask_and_weights_may_be_found_together_before_retraining(tmp_path: Path) -> None:
    settings = ("prune.methods=[magnitude]", "data.n_calibration=300", "train.epochs=6", "train.batch_size=32")
    plain, joint = (
        run(small("digits-iterative", *settings, setting), out=tmp_path, device="cpu")
        for setting in ("prune.repair=false", "prune.repair=true")
    )
    assert plain.folder.name == run_name(config_of(small("digits-iterative", *settings)))
    found = saved(joint.folder)
    for one, other in zip(plain.records[1:], joint.records[1:]):
        assert one["keep"] == other["keep"] and one["before"]["loss"] > other["before"]["loss"]
    above, below = (weights_of(found[f"seed0.magnitude.{level:02d}"]) for level in (1, 2))
    for name, (weight, mask) in below.items():
        assert not bool(weight[~mask].any()) and not bool((mask & ~above[name][1]).any())
    dense = found["seed0.dense"]
    assert any(not torch.equal(w, torch.where(mask, dense[f"model.{n}"], 0.0)) for n, (w, mask) in above.items())
    with pytest.raises(OptionError, match="belongs to the pipeline iterative"):
        small("digits-at-init", "prune.repair=true")


def test_what_a_record_says(tmp_path: Path) -> None:
    recipe = small("digits-iterative", "prune.methods=[sipp-det, magnitude]", "prune.levels=1")
    dense, det, magnitude = run(recipe, out=tmp_path, device="cpu").records
    assert (dense["pruned"], dense["method"], dense["level"]) == (None, None, 0)
    bounds = [record["pruned"]["bound"] for record in (det, magnitude)]
    assert bounds[0]["epsilon"] > 0 and not bounds[0]["met"] and "convolution" in bounds[0]["reason"]
    assert bounds[1]["epsilon"] is None and "none were scored" in bounds[1]["reason"]
    for record in (det, magnitude):
        assert 0 <= record["before"]["top1"] <= record["before"]["top5"] <= 1 and record["before"]["n"] == 360
        assert record["after"] != record["before"] and record["seconds"] > 0


def test_at_init_scores_on_batch_statistics(tmp_path: Path) -> None:
    recipe = small("digits-at-init", "prune.methods=[sipp-det]", "prune.levels=1", "prune.batch_size=10")
    record = run(recipe, out=tmp_path, device="cpu").records[1]
    assert "n=4 batches" in record["pruned"]["guarantee"]["sentence"]


def n_revived(*, broken: bool) -> tuple[int, int]:
    """(pruned weights that a second pruning chose, weights it chose), with a budget above the positive scores."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    points = torch.rand(20, 6)
    points[:, 3:] = 0  # half of the first layer's weights never meet anything: no sensitivity
    alive = {name: torch.rand(p.shape) < 0.7 for name, p in net.named_parameters() if p.dim() == 2}
    with torch.no_grad():
        for name, mask in alive.items():
            net.get_parameter(name).mul_(mask)
    ranking = rank(task_of(net, [points]), PruneOptions(method="sipp-det"))
    budget = sum(int(mask.sum()) for mask in alive.values()) - 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = cut(ranking if broken else only_alive(ranking, alive), budget).masks
    revived = sum(int((chosen[name] & ~mask).sum()) for name, mask in alive.items())
    return revived, sum(int(mask.sum()) for mask in chosen.values()) - budget


def test_a_pruned_weight_is_never_chosen_again() -> None:
    assert n_revived(broken=False) == (0, 0)
    assert n_revived(broken=True)[0] > 0


def test_a_second_run_trains_nothing_but_what_is_damaged(tmp_path: Path) -> None:
    recipe = small("digits-iterative", "prune.methods=[magnitude]")
    first = run(recipe, out=tmp_path, device="cpu")
    before = contents(first.folder)
    results = [*first.folder.glob("*/*"), first.folder / "records.jsonl"]
    times = [path.stat().st_mtime_ns for path in results]
    stage = first.folder / plan(recipe)[0].name
    # killed between saving the result and dropping what led to it
    (stage / f"{step_name(0, 0)}.safetensors").write_bytes((stage / "final.safetensors").read_bytes())
    again = run(recipe, out=tmp_path, device="cpu", accept_changes=True)
    assert [path.name for path in stage.iterdir()] == ["final.safetensors"]
    assert again.n_made == 0 and again.records == first.records
    assert [path.stat().st_mtime_ns for path in results] == times
    broken = first.folder / "seed0.magnitude.01" / "final.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1] + b"\xff")
    with pytest.warns(UserWarning, match="SHA-256"):
        run(recipe, out=tmp_path, device="cpu", accept_changes=True)
    assert contents(first.folder) == before
    assert [one.state for one in list_runs(tmp_path)] == ["finished"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_by_a_signal_and_resumed_to_the_same_bits(number: int, status: int, tmp_path: Path) -> None:
    recipe = small("digits-iterative", "prune.methods=[sipp-hybrid]", "prune.levels=1")
    whole = run(recipe, out=tmp_path / "whole", device="cpu")
    before = signal.getsignal(number)

    def stop(progress: Progress) -> None:
        if progress.epoch is not None and (progress.epoch.epoch == 1 or progress.stage.endswith("01")):
            os.kill(os.getpid(), number)

    statuses = []
    for _ in range(8):
        try:
            resumed = run(recipe, out=tmp_path / "parts", device="cpu", on_progress=stop, accept_changes=True)
            break
        except Interrupted as error:
            statuses.append(error.exit_status)
            assert list_runs(tmp_path / "parts")[0].state == "stopped"
            assert signal.getsignal(number) is before
    assert statuses == [status] * 3  # after epoch 1 of the dense network, after both epochs of the pruned one
    assert contents(resumed.folder) == contents(whole.folder)
    assert read_records(resumed.folder) == resumed.records
    assert not list(resumed.folder.rglob("step-*"))


def test_a_resumed_optimizer_has_the_memory_layout_of_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused steps on a GPU refuse another one."""
    recipe = small("digits-iterative", "prune.methods=[magnitude]", "prune.levels=1", "train.channels_last=true")
    first, seen = train_networks.train, list[bool]()

    def watched(state: TrainState, *given: Any, **options: Any) -> TrainState:
        for parameter, entries in state.optimizer.state.items():
            seen.append(entries["momentum_buffer"].stride() == parameter.stride())
        return first(state, *given, **options)

    def stop(progress: Progress) -> None:
        if progress.epoch is not None and progress.epoch.epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(recipe, out=tmp_path, device="cpu", on_progress=stop)
    monkeypatch.setattr(train_networks, "train", watched)
    run(recipe, out=tmp_path, device="cpu")
    assert seen and all(seen)


def test_a_signal_that_kills_the_workers_too_is_still_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("digits-iterative", "prune.methods=[magnitude]", "prune.levels=1", "train.batch_size=100")
    whole = run(recipe, out=tmp_path / "whole", device="cpu")
    fetch = loop.train_batches

    def dying(*arguments: Any, asked: bool = True, **options: Any) -> Iterator[Any]:
        for step, batch in fetch(*arguments, **options):
            if step == 3:
                if asked:
                    os.kill(os.getpid(), signal.SIGINT)
                raise DataError("a worker process failed")
            yield step, batch

    monkeypatch.setattr(loop, "train_batches", dying)
    with pytest.raises(Interrupted):
        run(recipe, out=tmp_path / "parts", device="cpu")
    saved_at = max((tmp_path / "parts").glob("*/seed0.dense/step-*"))
    assert saved_at.stem == step_name(0, 3)
    monkeypatch.setattr(loop, "train_batches", partial(dying, asked=False))
    with pytest.raises(DataError, match="worker"):
        run(recipe, out=tmp_path / "unasked", device="cpu")
    monkeypatch.setattr(loop, "train_batches", fetch)
    resumed = run(recipe, out=tmp_path / "parts", device="cpu", accept_changes=True)
    assert contents(resumed.folder) == contents(whole.folder)


def test_ladder_counts_what_is_left() -> None:
    assert [next_budget(left, 0.85) for left in (1000, 850, 722, 1, 0)] == [850, 722, 614, 1, 1]


def test_a_parent_that_is_damaged_after_its_turn_is_made_again(tmp_path: Path) -> None:
    recipe = small(
        "digits-iterative", "prune.methods=[magnitude]", "train.epochs=1", "train.decay={factor: 0.5, every: 1}"
    )
    whole = run(recipe, out=tmp_path / "whole", device="cpu")
    shown: list[str] = []

    def damage(progress: Progress) -> None:
        if progress.epoch is None:
            shown.append(progress.stage)
            if shown == ["seed0.dense", "seed0.magnitude.01"]:
                (path,) = (tmp_path / "hurt").glob("*/seed0.magnitude.01/final.safetensors")
                path.write_bytes(path.read_bytes()[:-1] + b"\xff")

    with pytest.warns(UserWarning, match="SHA-256"):
        hurt = run(recipe, out=tmp_path / "hurt", device="cpu", on_progress=damage)
    assert shown == ["seed0.dense", "seed0.magnitude.01", "seed0.magnitude.01", "seed0.magnitude.02"]
    assert contents(hurt.folder) == contents(whole.folder)
    assert read_run(hurt.folder).notes == ()  # the records are those beside the networks, clocks and all
