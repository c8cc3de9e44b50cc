"""Recipes: experiments as YAML files, checked by a schema."""

from sipp_lab.recipes.catalog import load_recipe, recipe_descriptions, recipe_names
from sipp_lab.recipes.schema import Code, Recipe, check_recipe, config_of

__all__ = ["Code", "Recipe", "check_recipe", "config_of", "load_recipe", "recipe_descriptions", "recipe_names"]
