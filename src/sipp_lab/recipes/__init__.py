"""Recipes: what to run. `table.py` holds the paper's, `schema.py` every key, `load.py` names, files and settings."""

from sipp_lab.recipes.load import load_recipe, recipe_of
from sipp_lab.recipes.schema import Recipe, config_of, is_own

__all__ = ["Recipe", "config_of", "is_own", "load_recipe", "recipe_of"]
