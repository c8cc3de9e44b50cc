"""Arms: labels, both forms of a method in one run, retraining of its own, distillation from the parent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lab.small_runs import STILL, equal, final, small
from torch import Tensor

from sipp.errors import OptionError
from sipp.report.palette import style_of
from sipp_lab.nets import build
from sipp_lab.page import render
from sipp_lab.recipes.arms import arm_of, label_of
from sipp_lab.runs import stages
from sipp_lab.runs.folder import FINAL, load_values, read_run
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import run

pytestmark = pytest.mark.usefixtures("narrow")

FORMS = "prune.methods=[sipp-det, sipp-det mean, magnitude]"


def masks(folder: Path, stage: str) -> dict[str, Tensor]:
    return {key: value for key, value in final(folder, stage).items() if key.startswith("mask.")}


def test_labels() -> None:
    assert arm_of("sipp-det  mean") == ("sipp-det", "mean") and label_of("sipp-det  mean") == "sipp-det mean"
    assert arm_of("magnitude") == ("magnitude", "max") and arm_of("sipp-rand max") == arm_of("sipp-rand")
    for bad in ("", " ", "mean", "sipp-det median", "sipp-det mean max", "magnitude mean", "sipp-blend max", 3, None):
        with pytest.raises(OptionError):
            arm_of(bad)


def test_both_forms_in_one_run(tmp_path: Path) -> None:
    both = run(small("digits-iterative", FORMS, "prune.keeps=[0.3, 0.1]"), RunOptions(out=tmp_path / "a", device="cpu"))
    assert [(r["method"], r["level"]) for r in both.records[1:]] == [
        (arm, level) for arm in ("sipp-det", "sipp-det mean", "magnitude") for level in (1, 2)
    ]
    assert {r["pruned"]["kept"] for r in both.records if r["level"] == 2} == {round(0.1 * 980)}
    found = masks(both.folder, "seed0.sipp-det+mean.01")
    other = masks(both.folder, "seed0.sipp-det.01")
    assert not equal(found, other)
    settings = ("prune.methods=[sipp-det max]", "prune.keeps=[0.3]")
    alone = run(small("digits-iterative", *settings), RunOptions(out=tmp_path / "b", device="cpu"))
    assert equal(other, masks(alone.folder, "seed0.sipp-det+max.01"))
    read = read_run(both.folder)
    assert read.finished and read.notes == () and "sipp-det mean" in render([read])
    labels = ("sipp-det", "sipp-det mean", "magnitude")
    looks = [style_of(label, labels) for label in labels]
    assert len({(look.marker, look.dash) for look in looks}) == 3


def test_retraining_of_its_own_length_and_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("prune.methods=[magnitude]", "prune.keeps=[0.3, 0.1]", "retrain.epochs=3")
    plain = run(small("digits-iterative", *settings), RunOptions(out=tmp_path, device="cpu"))
    epochs = [
        len(load_values(plain.folder / stage / FINAL)["epochs"]) for stage in ("seed0.dense", "seed0.magnitude.02")
    ]
    assert epochs == [2, 3]
    taught: list[dict[str, Tensor]] = []
    train = stages.train

    def watched(*arguments: Any, **options: Any) -> Any:
        if options["teacher"] is not None:
            taught.append({key: value.clone() for key, value in options["teacher"].state_dict().items()})
            assert not options["teacher"].training
        return train(*arguments, **options)

    monkeypatch.setattr(stages, "train", watched)
    recipe = small("digits-iterative", *settings, "retrain.distill={weight: 0.5, temperature: 4.0}")
    done = run(recipe, RunOptions(out=tmp_path, device="cpu"))
    dense = final(done.folder, "seed0.dense")
    assert len(taught) == 2  # both levels learn from the dense network, not from the level above
    assert all(torch.equal(one[key], dense[f"model.{key}"]) for one in taught for key in one)
    assert equal(dense, final(plain.folder, "seed0.dense"))
    assert not equal(final(plain.folder, "seed0.magnitude.01"), final(done.folder, "seed0.magnitude.01"))


def test_a_recipe_starts_from_the_initialisation_it_names(tmp_path: Path) -> None:
    still = (STILL, "prune.methods=[magnitude]", "prune.keeps=[0.5]")
    for init in ("he", "pytorch", "fan-out"):
        done = run(small("digits-at-init", *still, f"init={init}"), RunOptions(out=tmp_path, device="cpu"))
        torch.manual_seed(0)
        expected = build("digits-cnn", init=init).state_dict()  # type: ignore[arg-type]
        assert torch.equal(final(done.folder, "seed0.dense")["model.3.weight"], expected["3.weight"])


def test_the_constants_of_a_recipe_reach_the_bounds(tmp_path: Path) -> None:
    settings = (STILL, "prune.methods=[sipp-det]", "prune.keeps=[0.5]")
    usual = small("digits-iterative", *settings)
    other = small("digits-iterative", *settings, "prune.c_constant=6.0")
    one, two = (run(recipe, RunOptions(out=tmp_path, device="cpu")).records[-1] for recipe in (usual, other))
    for first, second in zip(one["pruned"]["layers"], two["pruned"]["layers"], strict=True):
        assert second["kept"] == first["kept"] and second["eps"] == pytest.approx(2 * first["eps"])
