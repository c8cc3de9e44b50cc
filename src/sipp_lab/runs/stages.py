"""One network of a run, from its parent to its record; a stage is done when its `final.safetensors` exists.

The recipe's pipeline decides which network a stage starts from, how it is pruned, and whether its masks change during
training. A stage that was stopped goes on from its checkpoint, which is that of an epoch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sipp
from sipp.results import from_json, to_json
from sipp_lab.pipelines import PIPELINES
from sipp_lab.processes import from_leader
from sipp_lab.recipes import Recipe
from sipp_lab.runs.context import Network, RunContext
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
from sipp_lab.runs.records import NetworkRecord, Stage
from sipp_lab.training import EpochRow, TrainState, in_eval_mode, new_state, train


def plan(recipe: Recipe) -> list[Stage]:
    """All networks of a recipe's run, in training order."""
    stages = []
    for seed in recipe.seeds:
        stages.append(Stage(seed, None, 0))
        for method in recipe.prune.methods:
            stages += [Stage(seed, method, level) for level in range(1, recipe.prune.n_levels + 1)]
    return stages


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


def train_networks(context: RunContext) -> Generator[Stage, None, None]:
    """Trains all stages that are not done, and yields each when it is."""
    for stage in from_leader(lambda: left_to_train(context.recipe, context.folder)):
        train_network(context, stage)
        yield stage


def train_network(context: RunContext, stage: Stage) -> None:
    """Prepares (or restores), trains and records the network of a stage whose parent is done."""
    path = context.folder / stage.name / CHECKPOINT
    began, hyper = time.monotonic(), context.recipe.hyper_of(stage.method)
    saved = from_leader(lambda: load_checkpoint(path) if path.is_file() else None)
    state = _new(context, stage) if saved is None else _restored(context, stage, saved)
    began -= 0.0 if saved is None else saved["seconds"]
    context.advance(state.epoch)

    pipeline, last_saved = PIPELINES[context.recipe.pipeline], time.monotonic()
    cut = None
    if pipeline.after_step is not None and stage.method is not None:
        cut = pipeline.after_step(context, stage, hyper.epochs * context.feed.n_steps(hyper.batch_size))

    def save_if_due() -> None:
        nonlocal last_saved
        if time.monotonic() - last_saved >= context.checkpoint_seconds and state.epoch < hyper.epochs:
            save_checkpoint(path, _values_of(state, seconds=time.monotonic() - began))
            last_saved = time.monotonic()

    def after_epoch(state: TrainState) -> None:
        from_leader(save_if_due)
        context.advance(1)

    train(
        state,
        context.feed,
        hyper,
        seed=stage.seed,
        teacher=_teacher(context, stage),
        after_step=cut,
        after_epoch=after_epoch,
    )
    _record(context, stage, state, time.monotonic() - began)


# --- the network that training starts from ----------------------------------------------------------------------------


def _new(context: RunContext, stage: Stage) -> TrainState:
    """The initial network, or that of the parent as the pipeline prepares it, the same in all processes."""
    pipeline, facts = PIPELINES[context.recipe.pipeline], Values()
    parent = pipeline.parent_of(stage)
    if parent is None:
        network = from_leader(lambda: context.initial_network(stage.seed))
    else:
        network = _finished(context, parent)
    if stage.method is not None:
        network, facts = pipeline.prepare(context, stage, network)
    return _state_of(context, stage, network, facts)


def _state_of(context: RunContext, stage: Stage, network: Network, facts: Values) -> TrainState:
    hyper = context.recipe.hyper_of(stage.method)
    state = new_state(context.module_of(network, hyper), hyper, masks=network.masks)
    state.facts = dict(facts)
    return state


def _finished(context: RunContext, stage: Stage) -> Network:
    """The trained network of a stage that is done."""
    tensors, _ = from_leader(lambda: load_state(context.folder / stage.name / FINAL))
    return Network.of_tensors(tensors)


def _teacher(context: RunContext, stage: Stage) -> nn.Module | None:
    """The dense network of the stage's seed as teacher, if the recipe asks for distillation."""
    hyper = context.recipe.hyper_of(stage.method)
    if hyper.distill is None:
        return None
    return context.module_of(_finished(context, stage.dense), hyper).eval().requires_grad_(False)


# --- checkpoints: training goes on from them bit for bit, and needs no random state -----------------------------------


def _values_of(state: TrainState, *, seconds: float) -> Values:
    """What a checkpoint holds of a state after an epoch."""
    return {
        "model": state.model.state_dict(),
        "masks": state.masks,
        "optimizer": state.optimizer.state_dict()["state"],
        "epoch": state.epoch,
        "rows": to_json(state.rows),
        "facts": state.facts,
        "seconds": seconds,
    }


def _restored(context: RunContext, stage: Stage, saved: Values) -> TrainState:
    """The inverse of `_values_of`."""
    state = _state_of(context, stage, Network(saved["model"], saved["masks"]), saved["facts"])
    state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": saved["optimizer"]})
    state.epoch = saved["epoch"]
    state.rows = tuple(from_json(EpochRow, row, "a checkpoint's row") for row in saved["rows"])
    return state


# --- what is recorded -------------------------------------------------------------------------------------------------


def _record(context: RunContext, stage: Stage, state: TrainState, seconds: float) -> None:
    """Saves the trained network and its record, which finishes the stage."""
    recipe, feed = context.recipe, context.feed
    sipp.release(state.model)
    one_image = next(feed.eval_batches(feed.splits.test[:1]))[0]
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
        "nonzero": {name: int(torch.count_nonzero(network.state[name])) for name in state.masks},
    }
    record = from_json(NetworkRecord, values, f"the record of {stage.name}")
    saved = to_json({"record": record, "epochs": state.rows})
    place = context.folder / stage.name

    def finish() -> None:
        save_state(place / FINAL, network.tensors(), saved)
        (place / CHECKPOINT).unlink(missing_ok=True)

    from_leader(finish)


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
