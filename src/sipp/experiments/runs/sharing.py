"""Networks that other runs in the same folder have made already: what decides a network's numbers, and taking it over.

A network depends on its own seed, arm and level and on the levels above it, never on the lists of a recipe. So a run
with one more method, seed or level, another pipeline or another loss in retraining trains only what no run has yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sipp.errors import SippError
from sipp.experiments.arms import arm_of
from sipp.experiments.recipes import Recipe, check_recipe, config_of
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.plan import Stage, plan
from sipp.records.schemas import Manifest
from sipp.scoring.methods import method_of
from sipp.storage import pairs
from sipp.storage.files import Values

TAKEN = "taken_from"  # in the record of a network that another run made: that run's folder
DENSE_KEYS = ("net", "init", "data", "train", "n_threads", "code")  # of a configuration: what decides the dense network


@dataclass(frozen=True)
class Found:
    """A network that is there already: the folder of its stage, and the run that made it."""

    folder: Path
    run: str
    manifest: Manifest


def stage_values(recipe: Recipe, stage: Stage) -> Values:
    """Everything that decides the numbers of a stage's network, beside data, code and device."""
    config, spec = config_of(recipe), recipe.prune
    values: Values = {"seed": stage.seed, **{key: config[key] for key in DENSE_KEYS}}
    values["train"] = {key: value for key, value in values["train"].items() if key != "eval_every"}  # which only looks
    if stage.method is None:
        return values
    arm = arm_of(stage.method)
    ladder = {"alpha": spec.alpha} if spec.keeps is None else {"keeps": list(spec.keeps[: stage.level])}
    return {
        **values,
        **{key: config[key] for key in ("pipeline", "retrain")},
        "arm": stage.method,
        "reduce": (arm.reduce or spec.reduce) if method_of(arm.method).is_scored else None,
        **{key: config["prune"][key] for key in ("delta", "draws", "batch_size")},
        "level": stage.level,
        **ladder,
    }


def stage_key(recipe: Recipe, stage: Stage) -> str:
    """What tells networks apart that have different numbers, and is the same for those that have the same."""
    return runs.config_hash(stage_values(recipe, stage))


def find_made(
    root: Path, recipe: Recipe, stages: Iterable[Stage], suits: Callable[[Manifest], bool]
) -> dict[Stage, Found]:
    """Which of these stages another run below `root` has finished whose manifest suits."""
    wanted = {stage_key(recipe, stage): stage for stage in stages}
    found: dict[Stage, Found] = {}
    own = runs.run_name(config_of(recipe))
    for folder in sorted(one for one in root.iterdir() if one.is_dir()) if root.is_dir() else ():
        if folder.name == own or not (folder / runs.MANIFEST).is_file() or not wanted:
            continue
        try:
            manifest = runs.read_manifest(folder)
            other = check_recipe(manifest.config, where=str(folder))
        except SippError:  # a run of another version, or broken: `sipp runs` says so, nothing is taken from it
            continue
        for stage in plan(other) if suits(manifest) else ():
            key = stage_key(other, stage)
            if key in wanted and pairs.has_pair(folder / stage.name, runs.FINAL):
                found[wanted.pop(key)] = Found(folder / stage.name, folder.name, manifest)
    return found


def same_origin(manifest: Manifest, origin: runs.Origin, *, accept_changes: bool) -> bool:
    """Whether all numbers of a run come from this data, code and device; accepted changes are never of the data."""
    if any(one.data != origin.data for one in manifest.origins):
        return False
    return accept_changes or all((one.code, one.device) == (origin.code, origin.device) for one in manifest.origins)


def take_over(
    store: runs.Store, recipe: Recipe, origin: runs.Origin, *, accept_changes: bool = False
) -> dict[Stage, str]:
    """The stages that were copied from other runs beside this one, each with the run it came from.

    A copy is checked as a network of the run's own is; its record says where it came from. With `accept_changes` the
    manifest names the origins of all of them.
    """
    todo = [stage for stage in plan(recipe) if not pairs.has_pair(store.stage(stage.name), runs.FINAL)]
    taken: dict[Stage, str] = {}
    found = find_made(
        store.folder.parent, recipe, todo, lambda one: same_origin(one, origin, accept_changes=accept_changes)
    )
    for stage, one in found.items():
        loaded = runs.load_if_sound(one.folder, runs.FINAL)
        if loaded is None:  # damaged: trained here
            continue
        tensors, values = loaded
        own = {"recipe": recipe.name, "pipeline": recipe.pipeline, TAKEN: values["record"].get(TAKEN, one.run)}
        runs.add_origins(store, one.manifest)
        runs.finish_stage(store.stage(stage.name), tensors, {**values, "record": {**values["record"], **own}})
        taken[stage] = one.run
    return taken
