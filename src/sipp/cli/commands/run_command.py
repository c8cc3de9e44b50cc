"""`sipp run`: runs the experiments of a recipe; can be stopped and resumed."""

from __future__ import annotations

from typing import Annotated

import typer

from sipp.cli import options as shared
from sipp.cli.options import MODEL_PANEL, option
from sipp.cli.output import Answer


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `sipp recipes`) or a .yaml file.")],
    settings: shared.Settings = None,
    model: Annotated[
        str | None,
        option("Your own network instead of the recipe's: package.module:callable.", MODEL_PANEL),
    ] = None,
    own_data: Annotated[
        str | None,
        option(
            "Your own data: package.module:callable that returns images and labels to train on, then to test on.",
            MODEL_PANEL,
        ),
    ] = None,
    *,
    how: shared.RunOptions,
) -> Answer | None:
    """Run a recipe, or resume one that was stopped; Ctrl-C stops it after the current step.

    Several processes: accelerate launch --num_processes 2 -m sipp run RECIPE ...
    """
    from sipp.cli.run_display import records_table, work_done
    from sipp.cli.run_work import run_recipes
    from sipp_lab.recipes import Code, load_recipe

    shared.load_code(how.code)
    named = Code(net=model, data=own_data) if model is not None or own_data is not None else None
    finished = run_recipes([load_recipe(recipe, settings=settings or (), code=named)], how)
    if finished is None:
        return None
    (done,) = finished
    summary = f"{work_done(done.n_made)}; records: {done.folder / 'records.jsonl'}"
    values = {"kind": "run", "folder": done.folder, "n_made": done.n_made, "records": done.records}
    return Answer([records_table(done.records), summary], values)
