"""Trains the networks of a run: each stage that is not done is prepared, trained and recorded.

A stage returns at once if its `final.safetensors` exists, and goes on from its checkpoint, which is that of an epoch.
The recipe's pipeline decides which network a stage starts from, and whether its masks change during training.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sipp
from sipp.results import from_json, to_json
from sipp_lab.parallel.processes import from_leader
from sipp_lab.pipelines import PIPELINES
from sipp_lab.recipes import Recipe
from sipp_lab.runs.context import Network, Prepared, RunContext
from sipp_lab.runs.folder import (
    CHECKPOINT,
    FINAL,
    Values,
    is_done,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
)
from sipp_lab.runs.records import NetworkRecord, Stage, stages_of
from sipp_lab.training.feed import eval_batches, n_steps
from sipp_lab.training.loop import EpochRow, TrainState, in_eval_mode, new_state, train
from sipp_lab.training.step import training_stream


def plan(recipe: Recipe) -> list[Stage]:
    """All networks of a recipe's run, in training order."""
    return stages_of(recipe.seeds, recipe.prune.methods, recipe.prune.n_levels)


def left_to_train(recipe: Recipe, folder: Path) -> list[Stage]:
    """The stages that are not done, or whose network descends from one that is not."""
    left: list[Stage] = []
    for stage in plan(recipe):
        if not is_done(folder, stage.name) or PIPELINES[recipe.pipeline].parent_of(stage) in left:
            left.append(stage)
    return left


def remove_orphans(recipe: Recipe, folder: Path) -> None:
    """Removes what descends from a network that is not there, such as one that was damaged."""
    left = left_to_train(recipe, folder)
    for stage in left:
        if PIPELINES[recipe.pipeline].parent_of(stage) in left:
            for name in (FINAL, CHECKPOINT):
                (folder / stage.name / name).unlink(missing_ok=True)


def train_networks(context: RunContext) -> Iterator[Stage]:
    """Trains all stages that are not done, and yields each when it is."""
    for stage in plan(context.recipe):
        name = stage.name
        if not from_leader(context.processes, lambda name=name: is_done(context.folder, name)):  # type: ignore[misc]
            train_network(context, stage)
            yield stage


def train_network(context: RunContext, stage: Stage) -> None:
    """Trains a stage whose parent is done."""
    path = context.folder / stage.name / CHECKPOINT
    saved = from_leader(context.processes, lambda: load_checkpoint(path) if path.is_file() else None)
    began, spent = time.monotonic(), 0.0
    if saved is None:
        network, facts = _prepared(context, stage)
        state = _new_state(context, stage, network)
        state.facts = dict(facts)
    else:
        state, spent = _restored(context, stage, saved), saved["seconds"]
    with training_stream(context.feed.device):
        _train(context, stage, state, path, began - spent)
        _record(context, stage, state, time.monotonic() - began + spent)


def _finished(context: RunContext, stage: Stage) -> Network:
    """The trained network of a stage that is done."""
    tensors, _ = from_leader(context.processes, lambda: load_state(context.folder / stage.name / FINAL))
    return Network.of_tensors(tensors)


def _prepared(context: RunContext, stage: Stage) -> Prepared:
    """The network that training starts from, the same in all processes."""
    pipeline = PIPELINES[context.recipe.pipeline]
    parent = pipeline.parent_of(stage)
    if parent is None:
        network = from_leader(context.processes, lambda: context.initial_network(stage.seed))
    else:
        network = _finished(context, parent)
    return (network, {}) if stage.method is None else pipeline.prepare(context, stage, network)


def _new_state(context: RunContext, stage: Stage, network: Network) -> TrainState:
    hyper = context.recipe.hyper_of(stage.method)
    return new_state(context.module_of(network, hyper), hyper, masks=network.masks)


def _teacher(context: RunContext, stage: Stage) -> nn.Module | None:
    """The dense network of the stage's seed as teacher, if the recipe asks for distillation."""
    hyper = context.recipe.hyper_of(stage.method)
    if hyper.distill is None:
        return None
    return context.module_of(_finished(context, stage.dense), hyper).eval().requires_grad_(False)


# --- what is recorded -------------------------------------------------------------------------------------------------


def _record(context: RunContext, stage: Stage, state: TrainState, seconds: float) -> None:
    """Saves the trained network and its record, which finishes the stage."""
    recipe, parts = context.recipe, state.facts.pop("part_seconds", {})
    parts = {**parts, "train": seconds - sum(parts.values())}
    sipp.release(state.model)
    one_image = next(eval_batches(context.feed, context.feed.splits.test[:1]))[0]
    network, last = Network.of(state.model, state.masks), state.rows[-1]
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
        "nonzero": {name: int(torch.count_nonzero(network.state[name])) for name in state.masks},
    }
    record = from_json(NetworkRecord, values, f"the record of {stage.name}")
    saved = to_json({"record": record, "epochs": state.rows})
    place = context.folder / stage.name

    def finish() -> None:
        save_state(place / FINAL, network.tensors(), saved)
        (place / CHECKPOINT).unlink(missing_ok=True)

    from_leader(context.processes, finish)


def multiply_adds(model: nn.Module, one_input: Tensor) -> int | None:
    """The multiply-adds of one input with the non-zero weights; None if those of a layer cannot be told.

    Every weight of a layer is used equally often, so a layer that keeps a share of its weights does that share of its
    products. Biases, norms and activations do not count, as usual.
    """
    with warnings.catch_warnings(), in_eval_mode(model), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about a switch for Intel's GPUs
        # Without oneDNN, torch runs a recurrent layer as the matrix products that its counter knows.
        with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
            model(one_input)
    counts, root, total = counter.get_flop_counts(), type(model).__name__, 0
    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
        if not weights:
            continue
        flops = sum(counts.get(f"{root}.{name}" if name else root, {}).values())
        uses, left = divmod(flops // 2, sum(weight.numel() for weight in weights))
        if not flops or left:  # none that torch counts, or other products than those with these weights
            return None
        total += uses * sum(int(torch.count_nonzero(weight)) for weight in weights)
    return total


# --- training that can be resumed -------------------------------------------------------------------------------------


def _train(context: RunContext, stage: Stage, state: TrainState, checkpoint: Path, began: float) -> None:
    """Trains the network of a stage, with a checkpoint after an epoch if the last one is old enough."""
    hyper, pipeline, changes = context.recipe.hyper_of(stage.method), PIPELINES[context.recipe.pipeline], None
    if pipeline.mask_changes is not None and stage.method is not None:
        changes = pipeline.mask_changes(context, stage, hyper.epochs * n_steps(context.feed, hyper))
    last_saved = time.monotonic()

    def save_if_due() -> None:
        nonlocal last_saved
        if time.monotonic() - last_saved >= context.checkpoint_seconds and state.epoch < hyper.epochs:
            values = {
                "model": state.model.state_dict(),
                "masks": state.masks,
                "optimizer": state.optimizer.state_dict()["state"],
                "epoch": state.epoch,
                "rows": to_json(state.rows),
                "facts": state.facts,
                "seconds": time.monotonic() - began,
            }
            save_checkpoint(checkpoint, values)
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


def _restored(context: RunContext, stage: Stage, saved: Values) -> TrainState:
    """The state in a checkpoint: training resumes from it bit for bit, and needs no random state."""
    state = _new_state(context, stage, Network(saved["model"], saved["masks"]))
    state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": saved["optimizer"]})
    state.epoch, state.facts = saved["epoch"], saved["facts"]
    state.rows = tuple(from_json(EpochRow, row, "a checkpoint's row") for row in saved["rows"])
    return state
