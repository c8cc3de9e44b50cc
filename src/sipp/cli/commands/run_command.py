"""`sipp run`: runs the experiments of a recipe, lists recipes and runs, and explains a recipe key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.options import load_code, out
from sipp.cli.output import Answer, listing, record_of
from sipp.errors import OptionError
from sipp.results import Option
from sipp_lab.runs.options import RunOptions


def run(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name or a .yaml file; without one, all recipes are listed.")
    ] = None,
    settings: list[str] | None = None,
    model: Annotated[
        str | None,
        Option("Your own network instead of the recipe's: package.module:callable.", "Model and data"),
    ] = None,
    own_data: Annotated[
        str | None,
        Option(
            "Your own data: package.module:callable that returns images and labels to train on, then to test on.",
            "Model and data",
        ),
    ] = None,
    show: Annotated[bool, out("Explain every key of the recipe. Run nothing.")] = False,
    dry_run: bool = False,
    status: Annotated[bool, out("List the runs in --out and how far each has got. Run nothing.")] = False,
    *,
    how: RunOptions,
) -> Answer | None:
    """Run a recipe, or resume one that was stopped; without a recipe, list them.

    Stop it at any time: finished networks are kept, and the same command goes on after the last saved epoch.
    Change any key of a recipe with --set KEY=VALUE, or in your own .yaml file that begins with `base: NAME`.

    Several processes: torchrun --nproc-per-node 2 -m sipp run RECIPE ...
    """
    if status:
        return _list_runs(how.out)
    if recipe is None:
        from sipp_lab.recipes.table import RECIPES

        return listing("recipes", {name: row["description"] for name, row in RECIPES.items()})
    from sipp_lab.recipes import load_recipe
    from sipp_lab.recipes.schema import keys_sheet, recipe_keys
    from sipp_lab.runs.planning import Plan, planned_run
    from sipp_lab.runs.running import run_each, work_done

    load_code(how.code)
    chosen = load_recipe(recipe, settings=settings or (), net=model, data=own_data)
    if show:
        values = {"kind": "recipe", "name": chosen.name, "keys": recipe_keys(chosen)}
        return Answer([keys_sheet(chosen)], values)
    if dry_run:
        planned = Plan((planned_run(chosen, how),))
        return Answer([planned], record_of("run plan", planned))
    finished = run_each([chosen], how)
    if finished is None:
        return None
    (done,) = finished
    end = f"{work_done(finished)}; records: {done.folder / 'records.jsonl'}"
    return Answer([done, end], record_of("run", done))


def _list_runs(out: Path) -> Answer:
    from sipp_lab.runs.folder import list_runs, runs_sheet

    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file", fix="give the folder of the runs")
    runs = list_runs(out)
    return Answer([runs_sheet(runs)], {"kind": "runs", "runs": runs})
