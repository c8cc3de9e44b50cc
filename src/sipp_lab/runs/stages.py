"""Trains the networks of a run: each stage that is not done is prepared, trained and recorded.

A stage returns at once if its `final.safetensors` exists, and goes on from its checkpoint, which is that of an epoch.
The recipe's pipeline decides which network a stage starts from, and whether its masks change during training.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sipp
from sipp.errors import DataError
from sipp.results import from_json, to_json
from sipp_lab.parallel.processes import from_leader
from sipp_lab.pipelines import PIPELINES
from sipp_lab.recipes import Recipe
from sipp_lab.runs.context import Network, Prepared, RunContext, with_prefix
from sipp_lab.runs.folder import CHECKPOINT, FINAL, Values, is_done, load_state, save_state
from sipp_lab.runs.records import NetworkRecord, Stage, stages_of
from sipp_lab.training.feed import eval_batches, n_steps
from sipp_lab.training.loop import EpochRow, TrainState, in_eval_mode, new_state, train
from sipp_lab.training.step import Teacher, training_stream

OPTIMIZER = "optimizer."


def plan(recipe: Recipe) -> list[Stage]:
    """All networks of a recipe's run, in training order."""
    return stages_of(recipe.seeds, recipe.prune.methods, recipe.prune.n_levels)


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
    checkpoint = from_leader(context.processes, lambda: load_state(path) if path.is_file() else None)
    began = time.monotonic()
    if checkpoint is None:
        prepared = _prepared(context, stage)
        state, spent = _new_state(context, stage, prepared.network), 0.0
        state.facts = dict(prepared.facts)
    else:
        state, spent = _restored(context, stage, *checkpoint)
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
    return Prepared(network, {}) if stage.method is None else pipeline.prepare(context, stage, network)


def _new_state(context: RunContext, stage: Stage, network: Network) -> TrainState:
    return new_state(context.module_of(network), context.recipe.hyper_of(stage.method), masks=network.masks)


def _teacher(context: RunContext, stage: Stage) -> Teacher | None:
    """The dense network of the stage's seed as teacher, if the recipe asks for distillation."""
    spec = context.recipe.hyper_of(stage.method).distill
    if spec is None:
        return None
    model = context.module_of(_finished(context, stage.dense)).eval().requires_grad_(False)
    return Teacher(model, spec.weight, spec.temperature)


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
            _save(checkpoint, state, time.monotonic() - began)
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
    state = _new_state(context, stage, Network.of_tensors(tensors))
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
