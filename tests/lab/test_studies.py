"""Studies: every one loads in both forms, its panels are the paper's, settings reach every recipe."""

import pytest

from sipp.errors import OptionError
from sipp_lab.recipes.schema import Recipe, recipe_keys
from sipp_lab.studies import STUDIES, study_named

NETS = ["resnet20", "resnet56", "resnet110", "vgg16", "densenet22", "wrn16-8"]
PANELS = {
    "paper-iterative": (NETS, [*NETS, "resnet18", "resnet101"]),
    "paper-at-init": (NETS, NETS),
    "paper-variants": (NETS[:2], NETS[:2]),
    "paper-fully-connected": (["digits-fc"] * 2, ["lenet-300-100"] * 2),
    "paper-cnn5": (["digits-cnn5"] * 2, ["cnn5"] * 2),
    "blend": (["resnet20"] * 3, ["resnet20"] * 3),
}


def test_the_panels_are_the_papers() -> None:
    assert set(STUDIES) == set(PANELS)
    for name, (short, full) in PANELS.items():
        study = STUDIES[name]
        quick, whole = study.recipes("short"), study.recipes("full")
        assert [recipe.net for recipe in quick] == short and [recipe.net for recipe in whole] == full
        assert study.description and study.source and study.claim
        assert all(not recipe.name.endswith("-short") for recipe in whole)
        if name.startswith("paper"):
            assert all(recipe.repetitions == (1 if "imagenet" in recipe.name else 3) for recipe in whole)
            # the paper trains on all that is not in S
            assert all(recipe.data.n_holdout == 0 for recipe in (*quick, *whole))


def test_common_values_and_settings_reach_every_recipe() -> None:
    arms = ("sipp-det mean", "sipp-det max", "sipp-rand", "sipp-hybrid", "magnitude")
    for form in ("short", "full"):
        for recipe in STUDIES["paper-variants"].recipes(form, ("repetitions=2", "seed=5")):  # type: ignore[arg-type]
            assert (recipe.prune.methods, recipe.seeds) == (arms, (5, 6))
    plain, distilled = STUDIES["blend"].recipes("full")[1:]
    assert plain.retrain is None and distilled.retrain is not None and distilled.retrain.distill is not None


def test_unknown_and_wrong() -> None:
    with pytest.raises(OptionError, match="did you mean 'paper-cnn5'"):
        study_named("paper-cnn")


def test_every_key_of_a_recipe_has_its_meaning() -> None:
    rows = recipe_keys(STUDIES["paper-cnn5"].recipes("short")[0])
    assert all(row["meaning"] for row in rows) and len({row["key"] for row in rows}) == len(rows) > 40
    found = {row["key"]: row["value"] for row in rows}
    assert found["prune.keeps"] == [0.5, 0.2, 0.1, 0.05, 0.02] and found["retrain.distill.weight"] is None
    assert set(Recipe.model_fields) == {key.split(".")[0] for key in found}
