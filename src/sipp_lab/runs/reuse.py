"""Reuses networks that other runs in the same folder have trained, if all their settings agree.

A network depends on its own seed, arm, level and the levels before it, not on which others a recipe lists. So a run
with one more method, seed or level, another pipeline or another retraining loss trains only what no run has yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from sipp.errors import SippError
from sipp.files import Values
from sipp.results.manifest import Manifest, Origin
from sipp.scoring.methods import method_of
from sipp.storage import state_files
from sipp_lab.arms import arm_of
from sipp_lab.recipes import Recipe, check_recipe, config_of
from sipp_lab.runs import store
from sipp_lab.runs.plan import Stage, plan

DENSE_KEYS = ("net", "init", "data", "train", "n_threads")  # of a configuration; these determine the dense network
# and these keys of its section `prune` a cut:
PRUNE_KEYS = ("delta", "draws", "allocation", "batch_size", "repair", "c_constant", "k_constant")


def stage_values(recipe: Recipe, stage: Stage) -> Values:
    """Everything that determines a stage's network, apart from data, code and device."""
    config, spec = config_of(recipe), recipe.prune
    own = recipe.code.methods or {} if recipe.code is not None else {}
    values: Values = {"seed": stage.seed, **{key: config[key] for key in DENSE_KEYS}}
    values["code"] = [recipe.code.net, recipe.code.data] if recipe.code is not None else [None, None]
    values["train"] = {key: value for key, value in values["train"].items() if key != "eval_every"}  # it only evaluates
    if stage.method is None:
        return values
    arm = arm_of(stage.method, own=own)
    uses_sensitivities = arm.method not in own and method_of(arm.method).uses_sensitivities
    ladder = {"alpha": spec.alpha} if spec.keeps is None else {"keeps": list(spec.keeps[: stage.level])}
    return {
        **values,
        **{key: config[key] for key in ("pipeline", "retrain")},
        "arm": stage.method,
        "score": own.get(arm.method),  # digest of a user's own score
        "reduce": (arm.reduce or spec.reduce) if uses_sensitivities else None,
        **{key: config["prune"][key] for key in PRUNE_KEYS if key in config["prune"]},
        "level": stage.level,
        **ladder,
    }


def stage_key(recipe: Recipe, stage: Stage) -> str:
    """A hash of `stage_values`: equal for networks that come out equal."""
    return store.config_hash(stage_values(recipe, stage))


def find_reusable(
    root: Path, recipe: Recipe, stages: Iterable[Stage], suits: Callable[[Manifest], bool]
) -> dict[Stage, Path]:
    """For each of these stages, the folder of the same network in another finished run whose manifest `suits`."""
    wanted = {stage_key(recipe, stage): stage for stage in stages}
    reusable: dict[Stage, Path] = {}
    own = store.run_name(config_of(recipe))
    for folder in store.folders_in(root):
        if folder.name == own or not (folder / store.MANIFEST).is_file() or not wanted:
            continue
        try:
            manifest = store.read_manifest(folder)
            other = check_recipe(manifest.config, where=str(folder))
        except SippError:  # broken, or of another version; `sipp runs` reports it
            continue
        for stage in plan(other) if suits(manifest) else ():
            key = stage_key(other, stage)
            if key in wanted and state_files.has_state(folder / stage.name, store.FINAL):
                reusable[wanted.pop(key)] = folder / stage.name
    return reusable


def reuse_networks(folder: Path, recipe: Recipe, origin: Origin, *, accept_changes: bool = False) -> None:
    """Copies finished networks from other runs beside this one with the same data, code and device.

    Copies are checked like the run's own networks, and their records name the run they come from. With
    `accept_changes`, code and device may differ (never the data), and the manifest lists all origins.
    """

    def suits(manifest: Manifest) -> bool:
        same_data = all(source.data == origin.data for source in manifest.origins)
        same_code = all((source.code, source.device) == (origin.code, origin.device) for source in manifest.origins)
        return same_data and (same_code or accept_changes)

    todo = [stage for stage in plan(recipe) if not state_files.has_state(folder / stage.name, store.FINAL)]
    for stage, place in find_reusable(folder.parent, recipe, todo, suits).items():
        loaded = store.load_if_intact(place, store.FINAL)
        if loaded is None:  # damaged: trained here
            continue
        tensors, values = loaded
        record, run = values["record"], place.parent
        own = {
            "recipe": recipe.name,
            "pipeline": recipe.pipeline,
            store.TAKEN_FROM: record.get(store.TAKEN_FROM) or run.name,
        }
        store.add_origins(folder, store.read_manifest(run))
        store.finish_stage(folder / stage.name, tensors, {**values, "record": {**record, **own}})
