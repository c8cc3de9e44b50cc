"""Loads the recipes of a study, in short or full form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sipp.errors import OptionError
from sipp.results.checking import first_problem, nearest
from sipp_lab.recipes.catalog import SUFFIX, derived_recipe, merge
from sipp_lab.recipes.schema import Recipe

Form = Literal["short", "full"]
Panel = str | dict[str, Any]  # the name of a recipe, or a recipe's values over those of its `base`


class StudySpec(BaseModel):
    """The content of a study's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    description: str  # one line for the list of studies
    source: str  # the figure of the paper
    claim: str  # what the paper says about it
    common: dict[str, Any] = Field(default_factory=dict)  # values shared by all recipes of the study
    short: Annotated[tuple[Panel, ...], Field(min_length=1)]  # takes minutes on two cores or one GPU
    full: Annotated[tuple[Panel, ...], Field(min_length=1)]  # as in the paper


@dataclass(frozen=True)
class Study:
    """One form of a study: its recipes, in the order of the panels, in which they also run."""

    name: str
    form: Form
    description: str
    source: str
    claim: str
    recipes: tuple[Recipe, ...]


def study_names() -> list[str]:
    """The names of all studies."""
    files = resources.files("sipp_lab.studies").iterdir()
    return sorted(file.name.removesuffix(SUFFIX) for file in files if file.name.endswith(SUFFIX))


def study_descriptions() -> dict[str, str]:
    """The description of each study."""
    return {name: _spec(name).description for name in study_names()}


def load_study(name: str, *, form: Form = "short", settings: Sequence[str] = ()) -> Study:
    """Loads a study by name, and applies the settings (`key=value`) to all its recipes."""
    spec = _spec(name)
    recipes = []
    for number, panel in enumerate(spec.short if form == "short" else spec.full, start=1):
        values = {"base": panel} if isinstance(panel, str) else panel
        over = merge(spec.common, values)
        recipes.append(derived_recipe(over, where=f"study {name!r}, {form}, recipe {number}", settings=settings))
    return Study(name, form, spec.description, spec.source, spec.claim, tuple(recipes))


def _spec(name: str) -> StudySpec:
    from sipp_lab.recipes.yamlfile import read_yaml

    if name not in study_names():
        hint = nearest(name, study_names())
        raise OptionError(f"unknown study {name!r:.60}{hint}", fix=f"known: {', '.join(study_names())}")
    text = resources.files("sipp_lab.studies").joinpath(name + SUFFIX).read_text(encoding="utf-8")
    try:
        return StudySpec.model_validate_json(json.dumps(read_yaml(text, where=f"study {name!r}")))
    except ValidationError as error:
        raise OptionError(first_problem(error), where=f"study {name!r}") from error
