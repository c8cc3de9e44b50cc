"""Networks that other runs in the same folder have made already: what decides a network's numbers, and copying it.

A network depends on its own seed, arm and level and on the levels above it, never on the lists of a recipe. So a run
with one more method, seed or level, another pipeline or another loss in retraining trains only what no run has yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from sipp.errors import SippError
from sipp.experiments.arms import arm_of
from sipp.experiments.recipes import Recipe, check_recipe, config_of
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.plan import Stage, plan
from sipp.records.schemas import Manifest, OriginRecord
from sipp.scoring.methods import method_of
from sipp.storage import state_files
from sipp.storage.files import Values, child_path

DENSE_KEYS = ("net", "init", "data", "train", "n_threads")  # of a configuration: what decides the dense network


def stage_values(recipe: Recipe, stage: Stage) -> Values:
    """Everything that decides the numbers of a stage's network, beside data, code and device."""
    config, spec = config_of(recipe), recipe.prune
    own = recipe.code.methods or {} if recipe.code is not None else {}
    values: Values = {"seed": stage.seed, **{key: config[key] for key in DENSE_KEYS}}
    values["code"] = [recipe.code.net, recipe.code.data] if recipe.code is not None else [None, None]
    values["train"] = {key: value for key, value in values["train"].items() if key != "eval_every"}  # which only looks
    if stage.method is None:
        return values
    arm = arm_of(stage.method, own=own)
    ladder = {"alpha": spec.alpha} if spec.keeps is None else {"keeps": list(spec.keeps[: stage.level])}
    return {
        **values,
        **{key: config[key] for key in ("pipeline", "retrain")},
        "arm": stage.method,
        "score": own.get(arm.method),  # of the user's own: what it is made of, whatever other scores there are
        "reduce": (arm.reduce or spec.reduce) if arm.method not in own and method_of(arm.method).is_scored else None,
        **{key: config["prune"][key] for key in ("delta", "draws", "batch_size", "repair") if key in config["prune"]},
        "level": stage.level,
        **ladder,
    }


def stage_key(recipe: Recipe, stage: Stage) -> str:
    """What tells networks apart that have different numbers, and is the same for those that have the same."""
    return runs.config_hash(stage_values(recipe, stage))


def find_reusable(
    root: Path, recipe: Recipe, stages: Iterable[Stage], suits: Callable[[Manifest], bool]
) -> dict[Stage, Path]:
    """The folder of each of these stages that another run below `root`, whose manifest suits, has finished."""
    wanted = {stage_key(recipe, stage): stage for stage in stages}
    reusable: dict[Stage, Path] = {}
    own = runs.run_name(config_of(recipe))
    for folder in runs.folders_in(root):
        if folder.name == own or not (folder / runs.MANIFEST).is_file() or not wanted:
            continue
        try:
            manifest = runs.read_manifest(folder)
            other = check_recipe(manifest.config, where=str(folder))
        except SippError:  # a run of another version, or broken: `sipp runs` says so, nothing is taken from it
            continue
        for stage in plan(other) if suits(manifest) else ():
            key = stage_key(other, stage)
            if key in wanted and state_files.has_state(folder / stage.name, runs.FINAL):
                reusable[wanted.pop(key)] = folder / stage.name
    return reusable


def reuse_networks(folder: Path, recipe: Recipe, origin: OriginRecord, *, accept_changes: bool = False) -> None:
    """Copies finished networks of other runs beside this one, of the same data, code and device.

    A copy is checked as a network of the run's own is; its record says where it came from. With `accept_changes` code
    and device may be others (never the data), and the manifest names the origins of all.
    """

    def suits(manifest: Manifest) -> bool:
        same_data = all(source.data == origin.data for source in manifest.origins)
        same_code = all((source.code, source.device) == (origin.code, origin.device) for source in manifest.origins)
        return same_data and (same_code or accept_changes)

    todo = [stage for stage in plan(recipe) if not state_files.has_state(child_path(folder, stage.name), runs.FINAL)]
    for stage, place in find_reusable(folder.parent, recipe, todo, suits).items():
        loaded = runs.load_if_sound(place, runs.FINAL)
        if loaded is None:  # damaged: trained here
            continue
        tensors, values = loaded
        record, run = values["record"], place.parent
        own = {
            "recipe": recipe.name,
            "pipeline": recipe.pipeline,
            runs.TAKEN_FROM: record.get(runs.TAKEN_FROM, run.name),
        }
        runs.add_origins(folder, runs.read_manifest(run))
        runs.finish_stage(child_path(folder, stage.name), tensors, {**values, "record": {**record, **own}})
