"""`sipp run`: runs the experiments of a recipe, lists recipes and runs, and explains a recipe key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sipp.cli.options import load_code, out
from sipp.cli.output import HOW_TO_REPAIR, Answer, listing
from sipp.cli.run_work import RunOptions, plan_of, records_table, run_recipes, work_done
from sipp.errors import OptionError
from sipp.results import Option, words

KEYS = ("pipeline", "n_done", "n_stages", "state", "n_origins")  # of a run, for --json


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
    show: Annotated[bool, out("Explain every key of the recipe; run nothing.")] = False,
    dry_run: bool = False,
    status: Annotated[bool, out("List the runs in --out and how far each has got; run nothing.")] = False,
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

        return listing("recipe", "what it does", "recipes", {name: row["description"] for name, row in RECIPES.items()})
    from sipp_lab.recipes import Code, load_recipe

    load_code(how.code)
    named = Code(net=model, data=own_data) if model is not None or own_data is not None else None
    chosen = load_recipe(recipe, settings=settings or (), code=named)
    if show:
        return _explain(chosen)
    if dry_run:
        return plan_of([chosen], how, {"kind": "run plan"})
    finished = run_recipes([chosen], how)
    if finished is None:
        return None
    (done,) = finished
    summary = f"{work_done(done.n_made)}; records: {done.folder / 'records.jsonl'}"
    values = {"kind": "run", "folder": done.folder, "n_made": done.n_made, "records": done.records}
    return Answer([records_table(done.records), summary], values)


def _explain(recipe: Any) -> Answer:
    """Every key of a recipe."""
    from sipp_lab.recipes.schema import recipe_keys

    rows = recipe_keys(recipe)
    table = words.plain_table("key", "value", "meaning", texts=("value", "meaning"))
    for row in rows:
        table.add_row(row["key"], escape(_as_yaml(row["value"])), escape(row["meaning"]))
    return Answer([table], {"kind": "recipe", "name": recipe.name, "keys": rows})


def _as_yaml(value: Any) -> str:
    """The value in YAML notation."""
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _list_runs(out: Path) -> Answer:
    """The runs in a folder."""
    from sipp_lab.runs.folder import list_runs

    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file", fix="give the folder that holds the runs")
    table = words.plain_table("run", "pipeline", "networks", "state", texts=("pipeline", "state"))
    broken, values = list[str](), list[dict[str, Any]]()
    for run in list_runs(out):
        is_broken = run.state == "broken"
        do = (run.fix or HOW_TO_REPAIR) if is_broken else None
        broken += [f"broken: {run.what}; {do}"] if is_broken else []
        note = "" if run.n_origins == 1 else f", {run.n_origins} origins (resumed with changes)"
        counts = "" if is_broken else f"{run.n_done} of {run.n_stages}"
        table.add_row(escape(run.folder.name), run.pipeline, counts, run.state + note)
        known = {key: None if is_broken and key != "state" else getattr(run, key) for key in KEYS}
        values.append({"name": run.folder.name, "folder": run.folder, **known, "what": run.what or None, "do": do})
    shown = [table if table.row_count else f"no runs in {out}", *broken]
    return Answer(shown, {"kind": "runs", "runs": values})
