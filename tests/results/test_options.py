"""One schema of options: arguments of the verbs, the record, the command line and recipes have the same names and
defaults."""

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import sipp
from sipp.results import Option, PruneOptions
from sipp_lab.recipes import load_recipe
from sipp_lab.recipes.schema import FROM_PRUNE, Pruning, recipe_keys

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(PruneOptions)}
OF_THE_CALL = {"within", "holdout", "progress"}  # what is no choice about the pruning: data, and what is shown
OTHERS = {("prune_on_disk", "method"): "wanda"}  # a blend would run every block many times


def arguments_of(name: str) -> dict[str, Any]:
    parameters = inspect.signature(getattr(sipp, name)).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def test_prune_takes_what_the_record_holds() -> None:
    arguments = arguments_of("prune")
    assert {name: arguments[name] for name in arguments.keys() - OF_THE_CALL} == DEFAULTS


@pytest.mark.parametrize("verb", ["prune_to", "prune_on_disk", "assess", "gradual", "certify", "check_assumption"])
def test_a_verb_that_shares_an_option_shares_its_default(verb: str) -> None:
    shared = {name: default for name, default in arguments_of(verb).items() if name in DEFAULTS}
    required = {name for name, default in shared.items() if default is inspect.Parameter.empty}
    assert shared and required <= {"keep"}
    assert {name: OTHERS.get((verb, name), DEFAULTS[name]) for name in shared.keys() - required} == {
        name: default for name, default in shared.items() if name not in required
    }


def test_recipes_take_words_and_checks_from_the_record() -> None:
    hints = get_type_hints(PruneOptions, include_extras=True)
    words = {row["key"]: row["meaning"] for row in recipe_keys(load_recipe("digits-iterative"))}
    for name in FROM_PRUNE:
        (option,) = (one for one in hints[name].__metadata__ if isinstance(one, Option))
        assert words[f"prune.{name}"] == option.words
        assert Pruning.model_fields[name].default == DEFAULTS[name]
    with pytest.raises(sipp.errors.OptionError, match=r"prune\.c_constant.*greater than 0"):
        load_recipe("digits-iterative", settings=["prune.c_constant=-1.0"])
