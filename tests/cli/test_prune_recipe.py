"""A pruning recipe gives the network that the same options give; typed options override it."""

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import run, three_lines

from sipp.cli.prune_recipe import known_keys
from sipp.records.options import PruneOptions

NET = ["--model", "digits-cnn", "--data", "random:8x1x8x8", "--dry-run", "--json"]
RECIPE = "keep: 0.4\nmethod: wt\nfloor: 0.1\nexclude: ['0.weight']\nseed: 3\nstatements: false\n"


def told(folder: Path, text: str, *words: object) -> dict[str, Any]:
    path = folder / "recipe.yaml"
    path.write_text(text)
    done = run("prune", *NET, "--recipe", path, *words)
    assert done.returncode == 0, done.stderr
    return {key: value for key, value in json.loads(done.stdout).items() if key not in ("seconds", "check")}


def test_a_recipe_does_what_its_options_do(tmp_path: Path) -> None:
    words = ["--keep", 0.4, "--method", "wt", "--floor", 0.1, "--exclude", "0.weight", "--seed", 3, "--no-statements"]
    typed = json.loads(run("prune", *NET, *words).stdout)
    found = told(tmp_path, RECIPE)
    assert found == {key: typed[key] for key in found} and found["method"] == "wt" and found["exclude"] == ["0.weight"]
    (tmp_path / "r.json").write_text(json.dumps({"keep": 0.4, "method": "wt", "floor": 0.1, "seed": 3}))
    assert run("prune", *NET, "--recipe", tmp_path / "r.json").returncode == 0


def test_what_is_typed_comes_first(tmp_path: Path) -> None:
    assert told(tmp_path, RECIPE, "--keep", 0.9, "--seed", 0)["seed"] == 0  # also where it is the default
    assert told(tmp_path, RECIPE, "--floor", "method", "--method", "lamp")["floor"] == "method"
    assert told(tmp_path, RECIPE, "--budget", 100)["kept"] == 100  # another goal than the recipe's


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kep: 0.4", "did you mean 'keep'"),
        ("keep: 2", "keep"),
        ("keep: 0.4\nrepair: maybe", "repair"),
        ("pattern: 2:4", "quotes"),
        ("epsilon: true", "not a number"),
        ("- keep", "a recipe is a mapping"),
        ("keep: [", "not valid YAML"),
        ("model: 'os:abort'", "unknown key 'model'"),
    ],
)
def test_what_a_recipe_may_not_say(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    done = run("prune", *NET, "--recipe", tmp_path / "recipe.yaml")
    found, where, _ = three_lines(done.stderr)
    assert done.returncode == 2 and what in found and where.startswith("--recipe")


def test_every_argument_of_prune_that_is_an_option_can_stand_in_it() -> None:
    hidden = {"scoring", "constants"}
    assert {*known_keys()} == {*PruneOptions.__dataclass_fields__} - hidden | {"epsilon", "max_accuracy_drop"}
