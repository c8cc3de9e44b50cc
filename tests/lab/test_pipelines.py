"""Pipelines: the ladder, shared parents, masks that only shrink, records, stopping and going on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.small_runs import STILL, Killed, contents, final, killed_at_every_checkpoint, saved, small
from torch import Tensor, nn

from sipp.errors import DataError, OptionError
from sipp.results.gradual import budget_at, cut_times
from sipp_lab import pipelines, training
from sipp_lab.page import render
from sipp_lab.recipes import Recipe
from sipp_lab.runs import running, stages
from sipp_lab.runs.folder import FINAL, list_runs, read_records, read_run
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.planning import planned_run
from sipp_lab.runs.running import run
from sipp_lab.runs.stages import plan
from sipp_lab.training import TrainState

pytestmark = pytest.mark.usefixtures("narrow")

METHODS = "prune.methods=[sipp-det, sipp-hybrid, magnitude, random]"


def weights_of(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (weight, mask)} of the prunable weights."""
    names = [key.removeprefix("mask.") for key in tensors if key.startswith("mask.")]
    return {name: (tensors[f"model.{name}"], tensors[f"mask.{name}"]) for name in names}


@pytest.mark.parametrize("pipeline", ["iterative", "at-init"])
def test_ladder_parents_and_masks(pipeline: str, tmp_path: Path) -> None:
    recipe = small(f"digits-{pipeline}", METHODS, STILL)
    done = run(recipe, RunOptions(out=tmp_path, device="cpu"))
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
            assert pruned["budget"] == left // 2 == pruned["kept"] == n_kept
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
        run(small("digits-iterative", *settings, setting), RunOptions(out=tmp_path, device="cpu"))
        for setting in ("prune.repair=false", "prune.repair=true")
    )
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
    dense, det, magnitude = run(recipe, RunOptions(out=tmp_path, device="cpu")).records
    assert (dense["pruned"], dense["method"], dense["level"]) == (None, None, 0)
    bounds = [record["pruned"]["bound"] for record in (det, magnitude)]
    assert bounds[0]["epsilon"] > 0 and not bounds[0]["met"] and "convolution" in bounds[0]["reason"]
    assert bounds[1]["epsilon"] is None and "none were scored" in bounds[1]["reason"]
    for record in (det, magnitude):
        assert 0 <= record["before"]["top1"] <= record["before"]["top5"] <= 1 and record["before"]["n"] == 360
        assert record["after"] != record["before"] and record["seconds"] > 0


def test_a_pruned_network_is_tested_and_trained_as_retrain_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("prune.methods=[magnitude]", "prune.levels=1", "retrain.channels_last=true")
    recipe, seen = small("digits-iterative", *settings, "retrain.precision=bfloat16"), list[tuple[bool, str]]()
    evaluate = training.evaluate

    def watched(model: nn.Module, *given: Any, precision: str) -> Any:
        weight = model.get_parameter("3.weight")
        seen.append((weight.is_contiguous(memory_format=torch.channels_last), precision))
        return evaluate(model, *given, precision="float32")  # oneDNN has no bfloat16 on older processors

    for module in (pipelines, training):
        monkeypatch.setattr(module, "evaluate", watched)
    monkeypatch.setattr(training, "logits_of", lambda forward, images, precision: forward(images))
    run(recipe, RunOptions(out=tmp_path, device="cpu"))
    assert seen == [(False, "float32")] * 2 + [(True, "bfloat16")] * 3  # two epochs, just pruned, two epochs


def test_at_init_scores_on_batch_statistics(tmp_path: Path) -> None:
    recipe = small("digits-at-init", "prune.methods=[sipp-det]", "prune.levels=1")
    record = run(recipe, RunOptions(out=tmp_path, device="cpu")).records[1]
    assert "n=1 batches" in record["pruned"]["guarantee"]["sentence"]


def test_every_level_is_drawn_with_a_seed_of_its_own(tmp_path: Path) -> None:
    recipe = small("digits-at-init", "prune.methods=[sipp-rand]", "train.epochs=1")
    _, first, second = run(recipe, RunOptions(out=tmp_path, device="cpu")).records
    assert first["pruned"]["seed"] != second["pruned"]["seed"]


def killed(*given: Any, **options: Any) -> None:
    raise Killed


def test_a_second_run_trains_nothing_but_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("digits-iterative", "prune.methods=[magnitude]")
    first = run(recipe, RunOptions(out=tmp_path, device="cpu"))
    before = contents(first.folder)
    results = [*first.folder.glob("*/*"), first.folder / "records.jsonl"]
    times = [path.stat().st_mtime_ns for path in results]
    again = run(recipe, RunOptions(out=tmp_path, device="cpu", accept_changes=True))
    assert again.n_made == 0 and again.records == first.records
    assert [path.stat().st_mtime_ns for path in results] == times
    for level, n_made in ((2, 1), (1, 2)):  # with what was pruned from it, which would descend from another network
        lost = first.folder / f"seed0.magnitude.{level:02d}" / FINAL
        lost.unlink()
        assert planned_run(recipe, RunOptions(out=tmp_path, device="cpu")).n_new == n_made
        with monkeypatch.context() as patch:
            patch.setattr(stages, "train_network", killed)
            with pytest.raises(Killed):
                run(recipe, RunOptions(out=tmp_path, device="cpu", accept_changes=True))
        assert len(saved(first.folder)) == len(read_records(first.folder)) == 3 - n_made  # gone before anything is made
        assert run(recipe, RunOptions(out=tmp_path, device="cpu", accept_changes=True)).n_made == n_made
        assert contents(first.folder) == before
    assert [one.state for one in list_runs(tmp_path)] == ["finished"]
    lost.write_bytes(lost.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"is damaged.*remove it"):
        run(recipe, RunOptions(out=tmp_path, device="cpu", accept_changes=True))


@pytest.mark.parametrize("name", ["digits-iterative", "digits-gradual"])
def test_killed_after_any_epoch_and_resumed_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A method that changes values as well, and epochs between the cuts of the gradual pipeline.
    settings = ("prune.methods=[sipp-hybrid]", "prune.levels=1", "train.epochs=6", "train.batch_size=128")
    recipe, n_cuts = small(name, *settings, "train.decay.milestones=[4]"), list[int]()
    whole = run(recipe, RunOptions(out=tmp_path / "whole", device="cpu"))
    done = killed_at_every_checkpoint(
        recipe, tmp_path / "parts", monkeypatch, lambda saved: n_cuts.append(len(saved["facts"].get("path", [])))
    )
    assert contents(done.folder) == contents(whole.folder) and len(n_cuts) == 2 * 5
    assert len(set(n_cuts)) >= (3 if name == "digits-gradual" else 1)
    assert read_records(done.folder) == done.records and read_run(done.folder).notes == ()


def test_the_bar_counts_every_epoch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[list[int]] = []

    @contextmanager
    def bar(title: str, total: int, *, shown: bool) -> Iterator[Any]:
        counts.append([total])
        yield counts[-1].append

    monkeypatch.setattr(running, "progress_bar", bar)
    recipe, how = small("digits-iterative", "prune.methods=[magnitude]", "prune.levels=1"), RunOptions(out=tmp_path)
    with monkeypatch.context() as patch:
        save = stages.save_checkpoint
        patch.setattr(stages, "save_checkpoint", lambda path, values: killed(save(path, values)))
        with pytest.raises(Killed):
            run(recipe, how, checkpoint_seconds=0.0)
    for _ in range(2):  # from the checkpoint of the first epoch to the end; with nothing left to do
        run(recipe, how)
    assert [(total, sum(done)) for total, *done in counts] == [(4, 0), (4, 4), (4, 4)]


def test_a_resumed_optimizer_has_the_memory_layout_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused steps on a GPU refuse another one."""
    recipe = small("digits-iterative", "prune.methods=[magnitude]", "prune.levels=1", "train.channels_last=true")
    save, first, strides = stages.save_checkpoint, stages.train, list[list[tuple[int, ...]]]()

    def noted(entries: Any) -> None:
        strides.append([entry["momentum_buffer"].stride() for entry in entries])

    def stopped(path: Path, values: dict[str, Any]) -> None:
        save(path, values)
        noted(values["optimizer"].values())
        raise Killed

    def watched(state: TrainState, *given: Any, **options: Any) -> TrainState:
        noted(state.optimizer.state.values())
        return first(state, *given, **options)

    monkeypatch.setattr(stages, "save_checkpoint", stopped)
    with pytest.raises(Killed):
        run(recipe, RunOptions(out=tmp_path, device="cpu"), checkpoint_seconds=0.0)
    monkeypatch.setattr(stages, "train", watched)
    run(recipe, RunOptions(out=tmp_path, device="cpu"))
    assert strides[0] == strides[1] and (72, 1, 24, 8) in strides[0]


# --- gradual --------------------------------------------------------------------------------------------------------


def gradual(*settings: str) -> Recipe:
    return small("digits-gradual", "train.batch_size=128", *settings)


def test_every_level_follows_the_schedule_from_the_dense_network(tmp_path: Path) -> None:
    done = run(gradual(STILL, "prune.methods=[sipp-det]"), RunOptions(out=tmp_path, device="cpu"))
    dense = final(done.folder, "seed0.dense")
    times = cut_times(2 * 8)
    for record in done.records[1:]:
        last = {1: 490, 2: 245}[record["level"]]
        assert record["pruned"]["kept"] == record["pruned"]["budget"] == last
        path = [(at, budget_at(t, 980, last) / 980) for at, t in times.items()]
        assert [(cut["after_step"], cut["keep"]) for cut in record["path"]] == path and max(times) < 2 * 8
        tensors = final(done.folder, f"seed0.{record['method']}.{record['level']:02d}")
        for layer in record["pruned"]["layers"]:
            weight, mask = tensors[f"model.{layer['name']}"], tensors[f"mask.{layer['name']}"]
            assert int(mask.sum()) == layer["kept"]
            assert torch.equal(weight, torch.where(mask, dense[f"model.{layer['name']}"], 0.0))
    page = render([read_run(done.folder)])
    assert "prune little by little" in page


def test_weights_that_sampling_changed_are_those_that_are_trained(tmp_path: Path) -> None:
    """T8 changes the values of what it keeps."""
    done = run(gradual(STILL, "prune.methods=[sipp-rand]", "prune.levels=1"), RunOptions(out=tmp_path, device="cpu"))
    dense, sampled = final(done.folder, "seed0.dense"), final(done.folder, "seed0.sipp-rand.01")
    masks = {key.removeprefix("mask."): mask for key, mask in sampled.items() if key.startswith("mask.")}
    assert any(not torch.equal(sampled[f"model.{name}"], dense[f"model.{name}"] * mask) for name, mask in masks.items())
