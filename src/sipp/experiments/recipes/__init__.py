"""Experiments as YAML, checked by a schema: the columns of the paper's two tables, short variants, smoke tests."""

from sipp.experiments.recipes.catalog import load_recipe, recipe_descriptions, recipe_names
from sipp.experiments.recipes.schema import Code, Recipe, check_recipe, config_of

__all__ = ["Code", "Recipe", "check_recipe", "config_of", "load_recipe", "recipe_descriptions", "recipe_names"]
