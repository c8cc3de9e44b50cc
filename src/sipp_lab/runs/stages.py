"""Trains the networks of a run: each stage that is not done is prepared, trained and recorded.

A stage returns at once if its `final.safetensors` exists, and goes on from its checkpoint, which is that of an epoch.
The recipe's pipeline decides which network a stage starts from, and whether its masks change during training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sipp
from sipp.errors import DataError
from sipp.results import from_json, to_json
from sipp_lab.files import load_state, save_state
from sipp_lab.parallel.processes import check_same, from_leader
from sipp_lab.pipelines import PIPELINES, Pipeline
from sipp_lab.recipes import Recipe
from sipp_lab.runs.context import Network, Prepared, RunContext, initial_network, module_of, network_of, with_prefix
from sipp_lab.runs.counting import multiply_adds
from sipp_lab.runs.folder import CHECKPOINT, FINAL, Values
from sipp_lab.runs.plan import Stage, stages_of
from sipp_lab.runs.records import NetworkRecord
from sipp_lab.training.distill import Teacher
from sipp_lab.training.feed import eval_batches, n_steps
from sipp_lab.training.loop import EpochRow, TrainState, new_state, train
from sipp_lab.training.step import training_stream

OPTIMIZER = "optimizer."


def plan(recipe: Recipe) -> list[Stage]:
    """All networks of a recipe's run, in training order."""
    return stages_of(recipe.seeds, recipe.prune.methods, recipe.prune.n_levels)


def pipeline_of(recipe: Recipe) -> Pipeline:
    """The pipeline of a recipe."""
    return PIPELINES[recipe.pipeline]


def is_done(folder: Path, stage: Stage) -> bool:
    """Whether the network of a stage is trained and recorded."""
    return (folder / stage.name / FINAL).is_file()


def train_networks(context: RunContext) -> Iterator[Stage]:
    """Trains all stages that are not done, and yields each when it is."""
    for stage in plan(context.recipe):
        if not from_leader(context.processes, lambda stage=stage: is_done(context.folder, stage)):  # type: ignore[misc]
            train_network(context, stage)
            yield stage


def train_network(context: RunContext, stage: Stage) -> None:
    """Trains a stage whose parent is done."""
    checkpoint = from_leader(context.processes, lambda: _load(context.place(stage) / CHECKPOINT))
    began = time.monotonic()
    if checkpoint is None:
        prepared = _prepared(context, stage)
        check_same(context.processes, prepared.network.tensors(), what="weights and masks")
        state, spent = _new_state(context, stage, prepared.network), 0.0
        state.facts = dict(prepared.facts)
    else:
        state, spent = _restored(context, stage, *checkpoint)
    with training_stream(context.feed.device):
        _train(context, stage, state, began - spent)
        _record(context, stage, state, time.monotonic() - began + spent)


def finished_network(context: RunContext, stage: Stage) -> Network:
    """The trained network of a stage that is done."""
    tensors, _ = from_leader(context.processes, lambda: load_state(context.place(stage) / FINAL))
    return network_of(tensors)


def _load(path: Path) -> tuple[dict[str, Tensor], Values] | None:
    return load_state(path) if path.is_file() else None


def _prepared(context: RunContext, stage: Stage) -> Prepared:
    """The network that training starts from."""
    pipeline = pipeline_of(context.recipe)
    parent = pipeline.parent_of(stage)
    network = initial_network(context, stage.seed) if parent is None else finished_network(context, parent)
    return Prepared(network, {}) if stage.method is None else pipeline.prepare(context, stage, network)


def _new_state(context: RunContext, stage: Stage, network: Network) -> TrainState:
    hyper = context.recipe.hyper_of(stage.method)
    return new_state(module_of(context, network), hyper, masks=network.masks or None)


def _record(context: RunContext, stage: Stage, state: TrainState, seconds: float) -> None:
    """Saves the trained network and its record, which finishes the stage."""
    recipe, parts = context.recipe, state.facts.pop("part_seconds", {})
    parts = {**parts, "train": seconds - sum(parts.values())}
    sipp.release(state.model)
    one_image = next(eval_batches(context.feed, context.feed.splits.test[:1]))[0]
    tensors = {key: tensor.detach().cpu() for key, tensor in state.model.state_dict().items()}
    network, last = Network(tensors, state.masks), state.rows[-1]
    values = {
        "recipe": recipe.name,
        "pipeline": recipe.pipeline,
        "net": recipe.net,
        "data": recipe.data.name,
        "seed": stage.seed,
        "method": stage.method,
        "level": stage.level,
        **state.facts,
        "multiply_adds": multiply_adds(state.model, one_image),
        "after": to_json(last.test),
        "train_loss": last.train_loss,
        "seconds": round(seconds, 3),
        "part_seconds": {name: round(part, 3) for name, part in parts.items()},
        "nonzero": {name: int(torch.count_nonzero(tensors[name])) for name in state.masks},
    }
    record = from_json(NetworkRecord, values, f"the record of {stage.name}")
    saved = to_json({"record": record, "epochs": state.rows})
    check_same(context.processes, network.tensors(), what="trained weights")

    def finish() -> None:
        save_state(context.place(stage) / FINAL, network.tensors(), saved)
        (context.place(stage) / CHECKPOINT).unlink(missing_ok=True)

    from_leader(context.processes, finish)


# --- training that can be resumed -------------------------------------------------------------------------------------


def _train(context: RunContext, stage: Stage, state: TrainState, began: float) -> None:
    """Trains the network of a stage, with a checkpoint after an epoch if the last one is old enough."""
    hyper, pipeline, changes = context.recipe.hyper_of(stage.method), pipeline_of(context.recipe), None
    if pipeline.mask_changes is not None and stage.method is not None:
        changes = pipeline.mask_changes(context, stage, hyper.epochs * n_steps(context.feed, hyper.batch_size))
    last_saved = time.monotonic()

    def save_if_due() -> None:
        nonlocal last_saved
        if time.monotonic() - last_saved >= context.checkpoint_seconds and state.epoch < hyper.epochs:
            _save(context.place(stage) / CHECKPOINT, state, time.monotonic() - began)
            last_saved = time.monotonic()

    def on_epoch(state: TrainState) -> None:
        from_leader(context.processes, save_if_due)
        context.on_step(stage, state)

    train(
        state,
        context.feed,
        hyper,
        seed=stage.seed,
        on_step=lambda state: context.on_step(stage, state),
        on_epoch=on_epoch,
        changes=changes,
        processes=context.processes,
        teacher=_teacher(context, stage),
    )


def _save(path: Path, state: TrainState, seconds: float) -> None:
    """Saves a checkpoint from which training resumes bit for bit; it needs no random state."""
    tensors = Network(dict(state.model.state_dict()), state.masks).tensors()
    for index, entries in state.optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{index}.{key}"] = value
            elif value is not None:
                raise DataError(f"the optimizer's {key!r} is a {type(value).__name__}: only tensors can be saved")
    values = {"epoch": state.epoch, "rows": to_json(state.rows), "facts": state.facts, "seconds": seconds}
    save_state(path, tensors, values)


def _restored(
    context: RunContext, stage: Stage, tensors: dict[str, Tensor], values: Values
) -> tuple[TrainState, float]:
    """The state in a checkpoint, and the seconds spent before it."""
    state = _new_state(context, stage, network_of(tensors))
    entries: dict[int, dict[str, Any]] = {}
    for key, tensor in with_prefix(tensors, OPTIMIZER).items():
        index, _, name = key.partition(".")
        entries.setdefault(int(index), {})[name] = tensor
    state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": entries})
    for parameter, kept in state.optimizer.state.items():  # fused steps want the memory layout of the parameter
        kept.update({n: torch.empty_like(parameter).copy_(t) for n, t in kept.items() if t.shape == parameter.shape})
    state.epoch, state.facts = values["epoch"], values["facts"]
    state.rows = tuple(from_json(EpochRow, row, "a checkpoint's row") for row in values["rows"])
    return state, float(values["seconds"])


def _teacher(context: RunContext, stage: Stage) -> Teacher | None:
    """The dense network of the stage's seed as teacher, if the recipe asks for distillation."""
    spec = None if context.recipe.retrain is None else context.recipe.retrain.distill
    if spec is None or stage.method is None:
        return None
    model = module_of(context, finished_network(context, stage.dense)).eval().requires_grad_(False)
    return Teacher(model, spec.weight, spec.temperature)
