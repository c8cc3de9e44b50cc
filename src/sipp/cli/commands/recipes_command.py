"""`sipp recipes`: lists the recipes, or explains one key by key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from sipp.cli.errors import CommandError
from sipp.cli.output import Answer, listing
from sipp.results.display import plain_table
from sipp_lab.recipes import load_recipe, recipe_descriptions
from sipp_lab.recipes.schema import recipe_keys


def recipes(
    action: Annotated[Literal["list", "show"], typer.Argument(help="List all, or show one.")] = "list",
    recipe: Annotated[str | None, typer.Argument(help="With show: a recipe's name or a .yaml file.")] = None,
) -> Answer:
    """List the recipes, or explain every key of one.

    Set any key with --set KEY=VALUE in `sipp run` and `sipp study`, or in your own .yaml file that begins with
    `base: NAME`.
    """
    if action == "list":
        return listing("recipe", "what it does", "recipes", recipe_descriptions())
    if recipe is None:
        raise CommandError(
            "the name of a recipe is missing", where="sipp recipes show", fix="give one of `sipp recipes`"
        )
    chosen = load_recipe(recipe)
    rows = recipe_keys(chosen)
    table = plain_table("key", "value", "meaning", texts=("value", "meaning"))
    for row in rows:
        table.add_row(row.key, escape(_as_yaml(row.value)), escape(row.meaning))
    return Answer([table], {"kind": "recipe", "name": chosen.name, "keys": [vars(row) for row in rows]})


def _as_yaml(value: Any) -> str:
    """The value in YAML notation."""
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
