"""Recipes: the paper's tables, derivation, and everything a recipe must refuse."""

import math
from pathlib import Path
from typing import Any

import pytest

from sipp.errors import OptionError
from sipp_lab.recipes import config_of, load_recipe
from sipp_lab.recipes.table import RECIPES
from sipp_lab.training import learning_rate

# The two tables of the paper, written down apart from the recipes: epochs, warm-up, batch, rate, decay factor and
# epochs, momentum, Nesterov, weight decay, delta, alpha.
RESNET = (182, 5, 128, 0.1, 0.1, [91, 136], 0.9, False, 1e-4, 1e-16, 0.85)
IMAGENET = (90, 5, 256, 0.1, 0.1, [30, 60, 80], 0.9, False, 1e-4, 1e-16, 0.90)
TABLE: dict[str, tuple[Any, ...]] = {
    "vgg16-cifar10": (300, 5, 256, 0.05, 0.5, list(range(30, 300, 30)), 0.9, False, 5e-4, 1e-16, 0.85),
    "resnet20-cifar10": RESNET,
    "resnet56-cifar10": RESNET,
    "resnet110-cifar10": RESNET,
    "densenet22-cifar10": (300, 5, 64, 0.1, 0.1, [150, 225], 0.9, True, 1e-4, 1e-16, 0.85),
    "wrn16-8-cifar10": (200, 5, 128, 0.1, 0.2, [60, 120, 180], 0.9, True, 5e-4, 1e-16, 0.85),
    "resnet18-imagenet": IMAGENET,
    "resnet101-imagenet": IMAGENET,
}
PIPELINES = ("iterative", "at-init")
PANELS = [  # the paper prunes at initialisation on CIFAR-10 only
    (column, pipeline)
    for column in TABLE
    for pipeline in PIPELINES
    if (column[-8:], pipeline) != ("imagenet", "at-init")
]


@pytest.mark.parametrize(("column", "pipeline"), PANELS)
def test_every_number_of_the_tables(column: str, pipeline: str) -> None:
    recipe = load_recipe(f"{column}-{pipeline}")
    epochs, warmup, batch, peak, factor, decays, momentum, nesterov, weight_decay, delta, alpha = TABLE[column]
    hyper = recipe.train
    assert (hyper.epochs, hyper.batch_size, hyper.momentum, hyper.nesterov) == (epochs, batch, momentum, nesterov)
    assert (hyper.weight_decay, hyper.optimizer) == (weight_decay, "sgd")
    assert (recipe.prune.delta, recipe.prune.alpha) == (delta, alpha if pipeline == "iterative" else None)
    assert recipe.pipeline == pipeline and len(recipe.seeds) == (1 if "imagenet" in column else 3)
    for epoch in (0, 1, 2.5, 5, 29, 30, 59, 60, 80, 90, 91, 120, 135, 136, 149, 150, 181, 199, 225, 299):
        if epoch < epochs:
            expected = peak * min(1, epoch / warmup) * factor ** sum(epoch >= d for d in decays)
            assert math.isclose(learning_rate(hyper, epoch), expected, rel_tol=1e-12), epoch


def test_every_recipe_loads() -> None:
    for name in RECIPES:
        recipe = load_recipe(name)
        assert learning_rate(recipe.train, recipe.train.epochs - 1e-9) > 0
        assert recipe.name == name and recipe.description


def test_recipes_have_the_epochs_and_rates_of_the_authors() -> None:
    for name in RECIPES:
        recipe = load_recipe(name)
        if "digits" not in name and name != "resnet20-cifar10-gradual":
            assert "sipp-det mean" in recipe.prune.methods
        retrained = {"vgg16-cifar10-iterative": 150, "vgg16-cifar10-iterative-short": 15}.get(name)
        assert recipe.hyper_of("snip").epochs == (retrained or recipe.train.epochs)
    other = load_recipe("wrn16-8-cifar10-at-init", settings=("train.decay.milestones=[60,120,160]",)).train
    assert [round(learning_rate(other, e), 8) for e in (59, 60, 120, 159, 160)] == [0.1, 0.02, 0.004, 0.004, 0.0008]


AT_INIT = [*(f"{column}-at-init" for column, pipeline in PANELS if pipeline == "at-init"), "cnn5-cifar10-at-init"]


@pytest.mark.parametrize("name", [*AT_INIT, "lenet-300-100-mnist-at-init", "lenet-5-mnist-at-init"])
def test_networks_are_pruned_at_the_initialisation_and_to_the_shares_of_the_authors(name: str) -> None:
    recipe = load_recipe(name)
    spec, is_small = recipe.prune, name.startswith("resnet20")
    assert recipe.init == "fan-out" and load_recipe(name.replace("at-init", "iterative")).init == "he"
    n_geometric, last = (10, 0.1) if is_small else (10, 0.01)
    ladder = [0.8 * (last / 0.8) ** (level / (n_geometric - 1)) for level in range(n_geometric)]
    ladder += [0.08, 0.06, 0.04, 0.02] if is_small else []
    assert spec.keeps == pytest.approx(ladder, rel=1e-3) and spec.n_levels == len(ladder)


def test_keeps_and_alpha_replace_each_other() -> None:
    listed = load_recipe("digits-iterative", settings=("prune.keeps=[0.3, 0.1]", "train.decay.every=2"))
    assert (listed.prune.alpha, listed.prune.levels, listed.prune.n_levels) == (None, None, 2)
    assert [listed.prune.keep_at(level) for level in range(3)] == [1.0, 0.3, 0.1]
    assert listed.train.decay.milestones is None
    back = load_recipe("digits-iterative", settings=("prune.keeps=[0.3]", "prune.alpha=0.5", "prune.levels=3"))
    assert (back.prune.keeps, back.prune.n_levels, back.prune.keep_at(2)) == (None, 3, 0.25)


def test_retraining_is_training_but_for_what_it_says() -> None:
    recipe = load_recipe(
        "digits-iterative", settings=("retrain.epochs=3", "retrain.decay={factor: 0.5, every: 1}", "retrain.rate=0.01")
    )
    first, again = recipe.train, recipe.hyper_of("snip")
    assert (first.epochs, again.epochs, first.batch_size) == (8, 3, again.batch_size)
    assert [learning_rate(again, epoch) for epoch in (1, 2)] == [0.005, 0.0025] and learning_rate(first, 1) == 0.1


def refused(text: str, *, settings: tuple[str, ...] = (), folder: Path) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        load_recipe(str(path), settings=settings)
    return str(caught.value)


GOOD = "base: digits-iterative\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD + "train: {epoch: 3}", ("train.epoch'", "did you mean 'train.epochs'")),
        (GOOD + "train: {decay: {facto: 0.1}}", ("train.decay.facto", "did you mean 'train.decay.factor'")),
        (GOOD + "train: {distill: {weight: 0.5, temperature: 1.0}}", ("set retrain.distill",)),
        (GOOD + "short: {repetitions: 1}", ("unknown key 'short'",)),
        (GOOD + "train: {rate: 1e-3}", ("train.rate", "1.0e-3")),
        (GOOD + "train: {rate: '0.1'}", ("train.rate", "text")),
        (GOOD + "train: {rate: .nan}", ("train.rate", "finite")),
        (GOOD + "train: {epochs: 0}", ("train.epochs",)),
        (GOOD + "train: {decay: {every: 3, milestones: [2]}}", ("train.decay", "exactly one")),
        (GOOD + "prune: {alpha: 0.5, keeps: [0.5]}", ("prune", "either alpha and levels, or keeps")),
        (GOOD + "prune: {keeps: [0.2, 0.5]}", ("prune", "keeps must decrease")),
        (GOOD + "prune: {methods: [sipp-det, sipp-det max]}", ("twice",)),
        (GOOD + "prune: {methods: [magnitude mean]}", ("prune.methods.0", "uses no sensitivities")),
        (GOOD + "prune: {methods: [sipp-blend mean]}", ("prune.methods.0", "tries both")),
        (GOOD + "prune: {methods: [sipp-det median]}", ("prune.methods.0", "max, mean")),
        (GOOD + "retrain: {distill: {weight: 0.0, temperature: 4.0}}", ("retrain.distill.weight",)),
        ("base: digits-at-init\nretrain: {epochs: 8}", ("retrain belongs to", "at-init")),
        (GOOD + "train: {augment: true}", ("mirroring digits",)),
        (GOOD + "retrain: {augment: true}", ("mirroring digits",)),
        (GOOD + "train: {optimizer: adam}", ("train: optimizer=adam takes no momentum: set momentum to null",)),
        (GOOD + "net: resnet2", ("resnet20",)),
        (GOOD + "net: resnet20", ("(3, 32, 32)",)),
        (GOOD + "prune: {methods: [magnitude, magnitude]}", ("twice",)),
        (GOOD + "prune: {methods: [sip]}", ("prune.methods.0",)),
        (GOOD + "seed: 2020-01-01", ("'seed' must be a whole number", "2020-01-01")),
        (GOOD + "train: !!python/object/apply:os.system [echo]", ("not valid YAML", "tag")),
        ("- 1", ("mapping",)),
        (GOOD + "train: {decay: {milestones: [9]}}", ("train: decay.milestones has 9", "within epochs=8")),
        (GOOD + "retrain: {decay: {milestones: [9]}}", ("retrain: decay.milestones has 9", "within epochs=8")),
        (GOOD + "train: {nesterov: true, momentum: 0.0}", ("train: nesterov needs a momentum above 0",)),
        ("{", ("not valid YAML",)),
        ("base: ../secrets", ("unknown recipe",)),
        ("base: [a]", ("unknown recipe",)),
        ("base: digits-iterativ", ("did you mean 'digits-iterative'",)),
        (GOOD + "name: ../x", ("'name'",)),
        ("net: digits-cnn", ("'train' is missing",)),
    ],
)
def test_refuses(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    message = refused(text, folder=tmp_path)
    assert all(word in message for word in words), message


def test_settings() -> None:
    plain = load_recipe("digits-iterative")
    changed = load_recipe(
        "digits-iterative", settings=("train.epochs=7", "prune.methods=[magnitude]", "train.rate=1.0e-2")
    )
    assert (changed.train.epochs, changed.prune.methods, changed.train.rate) == (7, ("magnitude",), 0.01)
    assert config_of(plain) != config_of(changed)
    for bad in ("train.epochs", "=3", "name=x", "train..epochs=3"):
        with pytest.raises(OptionError, match="--set"):
            load_recipe("digits-iterative", settings=(bad,))


def test_a_schedule_of_another_length_keeps_its_shape() -> None:
    """Unless it is said when the rate decays."""
    longer = load_recipe("digits-iterative", settings=("train.epochs=16",)).train
    assert (longer.decay.milestones, longer.decay.factor, longer.warmup_epochs) == ((12,), 0.1, 1.0)
    again = load_recipe("digits-iterative", settings=("retrain.epochs=4",)).hyper_of("snip")
    assert (again.epochs, again.decay.milestones, again.decay.factor, again.warmup_epochs) == (4, (3,), 0.1, 1.0)
    said = load_recipe("digits-iterative", settings=("retrain.epochs=4", "retrain.decay.milestones=[2]")).retrain
    assert said is not None
    assert (said.decay.milestones, said.decay.factor) == ((2,), 0.1)
    either = [
        load_recipe("digits-iterative", settings=settings).train.decay.milestones
        for settings in (
            ("train.epochs=16", "train.decay.milestones=[2]"),
            ("train.decay.milestones=[2]", "train.epochs=16"),
        )
    ]
    assert either == [(2,), (2,)]
    shortest = load_recipe("digits-iterative", settings=("train.epochs=1",)).train
    assert (shortest.decay.milestones, shortest.warmup_epochs) == ((), 1.0)
    every = [
        load_recipe("vgg16-cifar10-iterative", settings=settings).train.decay.every
        for settings in ((), ("train.epochs=30",), ("train.epochs=30", "train.decay.every=7"), ("train.epochs=5",))
    ]
    assert every == [30, 3, 7, 1]
    for name, n in (("vgg16-cifar10-iterative", 30), ("vgg16-cifar10-iterative-short", 3)):  # retrained half as long
        assert load_recipe(name).hyper_of("snip").decay.every == n


def test_unknown_recipes() -> None:
    for name in ("base", "digits-iterative-short", "../table", "nope"):
        with pytest.raises(OptionError, match="unknown recipe"):
            load_recipe(name)


def test_a_short_form_is_its_recipe_with_fewer_epochs_levels_and_seeds(tmp_path: Path) -> None:
    full, short = load_recipe("vgg16-cifar10-iterative"), load_recipe("vgg16-cifar10-iterative-short")
    assert (short.train.epochs, short.hyper_of("snip").epochs, short.repetitions, short.prune.levels) == (30, 15, 1, 5)
    changed = {"name", "repetitions", "train", "retrain", "prune"}
    assert {key for key, value in config_of(full).items() if config_of(short)[key] != value} == changed
    path = tmp_path / "mine.yaml"
    for base in (full, short):
        path.write_text(f"base: {base.name}\n")
        assert config_of(load_recipe(str(path))) == {**config_of(base), "name": "mine"}
