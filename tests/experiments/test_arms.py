"""Arms: labels, both forms of a method in one run, retraining of its own, distillation from the parent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sipp.errors import OptionError
from sipp.experiments.arms import Arm, arm_of
from sipp.experiments.nets import NETS, build
from sipp.experiments.recipes import Recipe, load_recipe
from sipp.experiments.runs import train_networks
from sipp.experiments.runs.reading import read_run
from sipp.experiments.runs.run_recipe import run
from sipp.report.palette import style_of
from sipp.report.rendering import render
from sipp.storage.state_files import load_state, load_values

pytestmark = pytest.mark.usefixtures("narrow")

SMALL = (
    "train.epochs=2",
    "train.decay={factor: 0.5, milestones: [1]}",
    "train.batch_size=256",
    "data.n_calibration=40",
)
FORMS = "prune.methods=[sipp-det, sipp-det mean, wt]"


def small(name: str, *settings: str) -> Recipe:
    return load_recipe(name, settings=(*SMALL, "data.n_holdout=0", *settings))


def masks(folder: Path, stage: str) -> dict[str, Tensor]:
    return {key: value for key, value in load_state(folder / stage, "final")[0].items() if key.startswith("mask.")}


def test_labels() -> None:
    assert arm_of("sipp-det  mean") == Arm("sipp-det", "mean") and arm_of("sipp-det  mean").label == "sipp-det mean"
    assert arm_of("wt") == Arm("wt") and arm_of("sipp-rand max").label == "sipp-rand max"
    for bad in ("", " ", "mean", "sipp-det median", "sipp-det mean max", "wt mean", "sipp-blend max", 3, None):
        with pytest.raises(OptionError):
            arm_of(bad)


def test_both_forms_in_one_run(tmp_path: Path) -> None:
    both = run(small("digits-iterative", FORMS, "prune.keeps=[0.3, 0.1]"), out=tmp_path / "a", device="cpu")
    assert [(r["method"], r["level"]) for r in both.records[1:]] == [
        (arm, level) for arm in ("sipp-det", "sipp-det mean", "wt") for level in (1, 2)
    ]
    assert {r["kept"] for r in both.records if r["level"] == 2} == {round(0.1 * 980)}
    found = masks(both.folder, "seed0.sipp-det-mean.01")
    other = masks(both.folder, "seed0.sipp-det.01")
    assert any(not torch.equal(found[key], other[key]) for key in found)
    settings = ("prune.methods=[sipp-det]", "prune.reduce=mean", "prune.keeps=[0.3]")
    alone = run(small("digits-iterative", *settings), out=tmp_path / "b", device="cpu")
    mean = masks(alone.folder, "seed0.sipp-det.01")
    assert all(torch.equal(found[key], mean[key]) for key in found)
    read = read_run(both.folder)
    assert read.finished and read.marks == () and "sipp-det mean" in render([read])
    labels = ("sipp-det", "sipp-det mean", "wt")
    looks = [style_of(label, labels) for label in labels]
    assert looks[0].light == looks[1].light and len({(look.marker, look.dash) for look in looks}) == 3


def test_retraining_of_its_own_length_and_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("prune.methods=[wt]", "prune.keeps=[0.3, 0.1]", "retrain.epochs=3")
    plain = run(small("digits-iterative", *settings), out=tmp_path, device="cpu")
    epochs = [len(load_values(plain.folder / stage, "final")["epochs"]) for stage in ("seed0.dense", "seed0.wt.02")]
    assert epochs == [2, 3]
    taught: list[dict[str, Tensor]] = []
    train = train_networks.train

    def watched(*arguments: Any, **options: Any) -> Any:
        if options["teacher"] is not None:
            taught.append({key: value.clone() for key, value in options["teacher"].model.state_dict().items()})
            assert not options["teacher"].model.training
        return train(*arguments, **options)

    monkeypatch.setattr(train_networks, "train", watched)
    done = run(
        small("digits-iterative", *settings, "retrain.distill={weight: 0.5, temperature: 4.0}"),
        out=tmp_path,
        device="cpu",
    )
    dense = load_state(done.folder / "seed0.dense", "final")[0]
    assert len(taught) == 2  # both levels learn from the dense network, not from the level above
    assert all(torch.equal(one[key], dense[f"model.{key}"]) for one in taught for key in one)
    same = load_state(plain.folder / "seed0.dense", "final")[0]
    assert all(torch.equal(dense[key], same[key]) for key in dense)
    weights = [load_state(one.folder / "seed0.wt.01", "final")[0] for one in (plain, done)]
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("net", ["digits-cnn", "cnn5", "lenet-300-100"])
def test_initialisations(net: str) -> None:
    for init, variance in (("he", 2.0), ("pytorch", 1 / 3)):
        torch.manual_seed(0)
        model = build(net, init=init)  # type: ignore[arg-type]
        torch.manual_seed(0)
        again = build(net, init=init)  # type: ignore[arg-type]
        for (name, weight), same in zip(model.named_parameters(), again.parameters()):
            assert torch.equal(weight, same)
            if weight.dim() > 1 and weight.numel() > 2000:
                found = weight.var().item() * weight[0].numel()
                assert abs(found / variance - 1) < 0.15, (name, found)
    with pytest.raises(OptionError, match="init"):
        build(net, init="xavier")  # type: ignore[arg-type]
    assert net in NETS


def test_a_recipe_starts_from_the_initialisation_it_names(tmp_path: Path) -> None:
    still = ("train.rate=1.0e-30", "prune.methods=[wt]", "prune.keeps=[0.5]")
    for init in ("he", "pytorch"):
        done = run(small("digits-at-init", *still, f"init={init}"), out=tmp_path, device="cpu")
        torch.manual_seed(0)
        expected = build("digits-cnn", init=init).state_dict()  # type: ignore[arg-type]
        found = load_state(done.folder / "seed0.dense", "final")[0]
        assert torch.equal(found["model.3.weight"], expected["3.weight"])
