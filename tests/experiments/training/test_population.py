"""Networks side by side: each comes out as if it were trained alone, with its own masks, batches, cuts and teacher."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experiments.hyperparameters import hyperparameters
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.experiments.data import ImageSet, split_images
from sipp.experiments.nets.cifar_resnet import CifarResNet
from sipp.experiments.nets.registry import he_init_
from sipp.experiments.recipes import Recipe, load_recipe
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.run_recipe import run
from sipp.experiments.training.distill import Teacher
from sipp.experiments.training.feed import Feed
from sipp.experiments.training.loop import TrainState, new_state, train
from sipp.experiments.training.population import Member, can_train, make_program, train_together
from sipp.experiments.training.stacking import StackedConv, stack
from sipp.storage.state_files import load_state

pytestmark = pytest.mark.usefixtures("narrow")

SEEDS = (0, 1, 1)
# 90 images: three steps, the last one short
HYPER = hyperparameters(2, 32, 0.02, weight_decay=1e-2, augment=True)


def feed() -> Feed:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (150, 3, 16, 16), generator=generator, dtype=torch.uint8)
    data = ImageSet("cifar10", images, torch.randint(0, 10, (150,), generator=generator), 100, 10)
    return Feed(data, split_images(data, n_calibration=10, n_holdout=0, seed=0), 10, torch.device("cpu"))


def networks(n: int = 3) -> list[nn.Module]:
    made = []
    for seed in range(n):
        torch.manual_seed(seed)
        made.append(CifarResNet(1, 10))
        he_init_(made[-1])
    return made


def some_masks(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.rand(p.shape, generator=generator) < 0.5 for k, p in model.named_parameters() if p.dim() > 1}


def assert_alike(one: TrainState, other: TrainState) -> None:
    for (key, a), b in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=key)
    assert [row.epoch for row in one.rows] == [row.epoch for row in other.rows]
    for mine, theirs in zip(one.rows, other.rows):
        assert mine.train_loss == pytest.approx(theirs.train_loss, rel=1e-4) and mine.rate == theirs.rate
        assert abs(mine.train_top1 - theirs.train_top1) < 0.03
        assert mine.test is not None and theirs.test is not None
        assert mine.test.loss == pytest.approx(theirs.test.loss, rel=1e-3)
        assert abs(mine.test.n_top1 - theirs.test.n_top1) <= 1 and abs(mine.test.n_top5 - theirs.test.n_top5) <= 1


@pytest.mark.parametrize("taught", [False, True])
def test_networks_trained_together_equal_those_trained_alone(taught: bool) -> None:
    data, models = feed(), networks()
    masks = [None, some_masks(models[1], 5), some_masks(models[2], 6)]
    parents = [copy.deepcopy(model).eval().requires_grad_(False) for model in reversed(models)]
    teachers = [Teacher(parent, 0.7, 3.0) for parent in parents] if taught else []
    alone = []
    for index, (model, mask, seed) in enumerate(zip(models, masks, SEEDS)):
        teacher = teachers[index] if taught else None
        alone.append(train(new_state(copy.deepcopy(model), HYPER, masks=mask), data, HYPER, seed=seed, teacher=teacher))
    states = [new_state(copy.deepcopy(model), HYPER, masks=mask) for model, mask in zip(models, masks)]
    members = [Member(state, seed) for state, seed in zip(states, SEEDS)]
    train_together(make_program(members, data, HYPER, teachers), members, data)
    for one, other, mask in zip(states, alone, masks):
        assert_alike(one, other)
        for name, kept in (mask or {}).items():
            weight = one.model.get_parameter(name)
            assert bool((weight[~kept] == 0).all()) and bool((weight[kept] != 0).all())
    apart = [state.model.get_parameter("linear.weight") for state in states]
    assert float((apart[0] - apart[1]).detach().abs().max()) > 0.1  # they are not all the same network


def test_adam_remembers_as_it_does_alone() -> None:
    hyper = hyperparameters(2, 32, 0.001, optimizer="adam")
    data, models = feed(), networks(2)
    alone = [train(new_state(copy.deepcopy(one), hyper), data, hyper, seed=3) for one in models]
    states = [new_state(one, hyper) for one in models]
    members = [Member(state, 3) for state in states]
    program = make_program(members, data, hyper)
    train_together(program, members, data)
    for one, other in zip(states, alone):
        assert one.rows[-1].train_loss == pytest.approx(other.rows[-1].train_loss, rel=1e-2)
        mine, theirs = one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
        assert mine[0]["step"] == theirs[0]["step"] == 6 and mine[0]["exp_avg"].shape == theirs[0]["exp_avg"].shape
    again = [Member(new_state(one, hyper), 3) for one in networks(2)]  # the same program: nothing is left of the first
    assert can_train(program, again, hyper) and not can_train(program, again[:1], hyper)
    train_together(program, again, data)
    for one, member in zip(states, again):
        assert all(
            torch.equal(a, b) for a, b in zip(one.model.state_dict().values(), member.state.model.state_dict().values())
        )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 2, 3, 5]), st.integers(1, 3),
    st.integers(0, 2), st.integers(5, 9), st.integers(5, 9), st.booleans(), st.integers(0, 2),
)  # fmt: skip
def test_a_stacked_convolution_is_that_of_each(
    n_nets: int, n_in: int, n_out: int, side: int, stride: int, padding: int, height: int, width: int, bias: bool,
    extra: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    convs = [nn.Conv2d(n_in, n_out, side, stride, padding, bias=bias).double() for _ in range(n_nets)]
    images = torch.randn(2, n_nets, n_in, height, width, dtype=torch.float64)
    filled = F.pad(images, (0, 0, 0, 0, 0, extra), value=7.0)  # what is added counts nothing, whatever it is
    found = StackedConv(convs)(filled.flatten(1, 2)).unflatten(1, (n_nets, -1))
    expected = torch.stack([conv(images[:, index]) for index, conv in enumerate(convs)], 1)
    torch.testing.assert_close(found, expected)


def test_what_cannot_stand_side_by_side_is_named() -> None:
    def made(*modules: nn.Module) -> list[nn.Module]:
        return [nn.Sequential(nn.Conv2d(3, 4, 3), *copy.deepcopy(modules)) for _ in range(2)]

    for odd in (nn.Dropout(), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2), nn.GroupNorm(2, 4)):
        with pytest.raises(ModelError, match=f"1: a {type(odd).__name__}"):
            stack(made(odd))
    with pytest.raises(ModelError, match="momentum"):
        stack(made(nn.BatchNorm2d(4, momentum=None)))


# --- whole runs -------------------------------------------------------------------------------------------------------


def small(name: str, *more: str) -> Recipe:
    given = ("train.epochs=2", "train.decay={factor: 0.5, milestones: [1]}", "train.batch_size=256")
    return load_recipe(name, settings=(*given, "data.n_calibration=40", "data.n_holdout=0", *more))


@pytest.mark.parametrize("name", ["digits-iterative", "digits-at-init", "digits-gradual"])
def test_a_run_of_many_at_once_is_a_run(name: str, tmp_path: Path) -> None:
    more = ("prune.methods=[wt, sipp-det mean]", "prune.keeps=[0.3, 0.1]", "train.rate=0.01")
    taught = ("retrain={distill: {weight: 0.5, temperature: 2.0}}",) if name == "digits-iterative" else ()
    alone = run(small(name, *more, *taught), out=tmp_path / "alone", device="cpu")
    many = run(small(name, *more, *taught, "train.together=2"), out=tmp_path / "many", device="cpu")
    assert len(many.records) == len(alone.records) == 5
    for mine, theirs in zip(many.records, alone.records):
        for key in ("seed", "method", "level", "kind", "kept", "budget", "path"):
            assert mine.get(key) == theirs.get(key)
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.1)
        assert abs(mine["after"]["top1"] - theirs["after"]["top1"]) < 0.1
    stages = sorted(one.name for one in many.folder.iterdir() if one.is_dir())
    first = [load_state(many.folder / stage, "final")[0]["model.0.weight"] for stage in stages]
    assert len({tuple(one.flatten().tolist()) for one in first}) == 5


class Killed(Exception):
    """Stands for a process that is killed."""


# Between two members' checkpoints the group begins anew; or after them all. Gradual has a cut at nearly every step, at
# which what the optimizers remember goes through the members in any case: iterative has none.
@pytest.mark.parametrize(("name", "after"), [("digits-gradual", 1), ("digits-gradual", 3), ("digits-iterative", 3)])
def test_stopped_and_resumed_to_the_same_bits(
    name: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("prune.methods=[wt, sipp-hybrid, random]", "prune.keeps=[0.3]", "train.together=3", "train.epochs=3")
    recipe = small(name, *more)
    whole = run(recipe, out=tmp_path / "whole", device="cpu")
    save, n_saved = runs.save_checkpoint, 0

    def dying(*arguments: Any) -> None:
        nonlocal n_saved
        save(*arguments)
        n_saved += "dense" not in str(arguments[0])
        if n_saved == after:
            n_saved += 1
            raise Killed

    monkeypatch.setattr(runs, "save_checkpoint", dying)
    with pytest.raises(Killed):
        run(recipe, out=tmp_path / "parts", device="cpu", checkpoint_seconds=0.0)
    done = run(recipe, out=tmp_path / "parts", device="cpu", checkpoint_seconds=0.0)
    for stage in ("seed0.wt.01", "seed0.sipp-hybrid.01", "seed0.random.01"):
        mine, theirs = (load_state(one.folder / stage, "final")[0] for one in (done, whole))
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_training_together_is_refused_on_ray(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="side by side"):
        run(small("digits-at-init", "train.together=2"), out=tmp_path, device="cpu", engine="ray")
