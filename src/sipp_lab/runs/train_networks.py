"""Trains the networks of a run: for each stage that is not done, prepare a network, train it, record it.

Files of a stage: step-* (checkpoints, the first of them before training) -> final; what exists is not computed again.
The recipe's pipeline decides which network a stage starts from, and whether its masks change during training.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sipp.errors import DataError
from sipp.files import Values
from sipp.native.compiling import compiling_seconds
from sipp.pruning.masking import release
from sipp.results.jsonio import from_json, to_json
from sipp.results.run_records import EpochRow, NetworkRecord
from sipp_lab.parallel.processes import (
    Processes,
    check_same,
    from_leader,
    max_over_processes,
    share_buffers,
    sum_over_processes,
)
from sipp_lab.pipelines import parent_of, pipeline_of
from sipp_lab.runs import store
from sipp_lab.runs.context import (
    Network,
    Prepared,
    RunContext,
    initial_network,
    module_of,
    network_from_tensors,
    strip_prefix,
)
from sipp_lab.runs.counting import multiply_adds
from sipp_lab.runs.plan import Stage, plan
from sipp_lab.training.distill import Teacher
from sipp_lab.training.feed import eval_batches, n_steps
from sipp_lab.training.loop import TrainState, new_state, train
from sipp_lab.training.signals import Interrupted
from sipp_lab.training.step import training_stream

OPTIMIZER = "optimizer."
SUMS = "sums"


def train_networks(context: RunContext) -> Generator[Stage, None, None]:
    """Trains all stages that are not done, and yields each when it is."""
    for stage in plan(context.recipe):
        yield from train_network(context, stage)


def train_network(context: RunContext, stage: Stage) -> Iterator[Stage]:
    """Trains a stage (and its parents, if they were damaged), and yields each when it is done."""
    if finished_network(context.processes, context.stage_folder(stage)) is not None:
        return
    parent = parent_of(context.recipe.pipeline, stage)
    if parent is not None:
        yield from train_network(context, parent)  # normally done already
    newest = _newest_checkpoint(context, stage)
    if newest is None:
        _prepare(context, stage)
        newest = _newest_checkpoint(context, stage)
        assert newest is not None
    _stop_if_signalled(context)
    with training_stream(context.feed.device):
        state, spent = _restored(context, stage, *newest)
        seconds = _train(context, stage, state, spent)
        _record(context, stage, state, seconds)
    yield stage


def _newest_checkpoint(context: RunContext, stage: Stage) -> tuple[dict[str, Tensor], Values] | None:
    return from_leader(context.processes, lambda: store.newest_checkpoint(context.stage_folder(stage)))


def finished_network(processes: Processes, folder: Path) -> Network | None:
    """The network of a finished stage, None if it is not finished or damaged; removes leftover checkpoints."""
    saved = from_leader(processes, lambda: store.load_if_intact(folder, store.FINAL))
    if saved is None:
        return None
    from_leader(processes, lambda: store.drop_checkpoints(folder))
    return network_from_tensors(saved[0])


def _prepare(context: RunContext, stage: Stage) -> None:
    """Creates the network that training starts from, and saves it as the first checkpoint."""
    began, compiled = time.monotonic(), compiling_seconds()
    if stage.method is None:
        prepared = Prepared(initial_network(context, stage.seed), {})
    else:
        parent = parent_of(context.recipe.pipeline, stage)
        network = None if parent is None else finished_network(context.processes, context.stage_folder(parent))
        prepared = pipeline_of(context.recipe.pipeline).prepare(context, stage, network)
    check_same(context.processes, prepared.network.tensors(), what="weights and masks")
    state = _new_state(context, stage, prepared.network)
    state.facts = dict(prepared.facts)
    if "part_seconds" in state.facts:
        state.facts["part_seconds"] = {**state.facts["part_seconds"], "compile": compiling_seconds() - compiled}
    _save(context, stage, state, time.monotonic() - began)


def _new_state(context: RunContext, stage: Stage, network: Network) -> TrainState:
    return new_state(module_of(context, network), context.hyper(stage), masks=network.masks or None)


def _record(context: RunContext, stage: Stage, state: TrainState, seconds: float) -> None:
    """Saves the trained network and its record, which finishes the stage."""
    recipe, parts = context.recipe, state.facts.pop("part_seconds", {})
    parts = {**parts, "train": seconds - sum(parts.values())}
    release(state.model)
    one_image = next(eval_batches(context.feed, context.feed.splits.test[:1]))[0]
    tensors = {key: tensor.detach().cpu() for key, tensor in state.model.state_dict().items()}
    result, final = Network(tensors, state.masks), state.rows[-1].test
    assert final is not None
    nonzero = {name: int(torch.count_nonzero(tensors[name])) for name in state.masks}
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
        "after": to_json(final),
        "train_loss": state.rows[-1].train_loss,
        "seconds": round(seconds, 3),
        "part_seconds": {name: round(part, 3) for name, part in parts.items()},
        "nonzero": nonzero,
    }
    record = from_json(NetworkRecord, values, f"the record of {stage.name}")
    saved = to_json({"record": record, "epochs": state.rows})
    check_same(context.processes, result.tensors(), what="trained weights")
    folder = context.stage_folder(stage)
    from_leader(context.processes, lambda: store.finish_stage(folder, result.tensors(), saved))


# --- training that can be interrupted ---------------------------------------------------------------------------------


def _train(context: RunContext, stage: Stage, state: TrainState, spent: float) -> float:
    """Trains the network of a stage; returns the seconds spent on it, of which `spent` before this call."""
    began = last_saved = time.monotonic()
    hyper, pipeline, changes = context.hyper(stage), pipeline_of(context.recipe.pipeline), None
    if pipeline.mask_changes is not None and stage.method is not None:
        changes = pipeline.mask_changes(context, stage, hyper.epochs * n_steps(context.feed, hyper.batch_size))

    def save() -> None:
        nonlocal last_saved
        _save(context, stage, state, spent + time.monotonic() - began)
        last_saved = time.monotonic()

    def on_step(state: TrainState) -> None:
        if state.step == 0:
            context.on_epoch(stage.name, state.rows[-1])
        is_due = time.monotonic() - last_saved >= context.checkpoint_seconds and state.epoch < hyper.epochs
        asked, due = max_over_processes(
            context.processes, (context.stop_signal() or 0, is_due and context.processes.is_leader)
        )
        if asked or due:
            save()
        if asked:
            raise Interrupted(asked)

    try:
        train(
            state,
            context.feed,
            hyper,
            seed=stage.seed,
            on_step=on_step,
            changes=changes,
            processes=context.processes,
            teacher=_teacher(context, stage),
        )
    except DataError:
        # Ctrl-C also kills the image-decoding workers; then this is not an error. Only fetching a batch raises
        # DataError, so the state is that after a complete step.
        asked = context.stop_signal()
        if asked is None or context.processes.world_size > 1:
            raise
        save()
        raise Interrupted(asked) from None
    return spent + time.monotonic() - began


def _save(context: RunContext, stage: Stage, state: TrainState, seconds: float) -> None:
    """Saves a checkpoint from which training resumes bit for bit; it needs no random state."""
    processes, folder = context.processes, context.stage_folder(stage)
    share_buffers(processes, state.model)
    tensors = Network(dict(state.model.state_dict()), state.masks).tensors()
    tensors[SUMS] = sum_over_processes(processes, state.sums)
    for index, entries in state.optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{index}.{key}"] = value
            elif value is not None:
                raise DataError(f"the optimizer's {key!r} is a {type(value).__name__}: only tensors can be saved")
    values = {
        "epoch": state.epoch,
        "step": state.step,
        "rows": to_json(state.rows),
        "facts": state.facts,
        "seconds": seconds,
    }
    name = store.step_name(state.epoch, state.step)
    from_leader(context.processes, lambda: store.save_checkpoint(folder, name, tensors, values))


def _teacher(context: RunContext, stage: Stage) -> Teacher | None:
    """The dense network of the stage's seed as teacher, if the recipe asks for distillation."""
    spec = None if context.recipe.retrain is None else context.recipe.retrain.distill
    if spec is None or stage.method is None:
        return None
    dense = finished_network(context.processes, context.stage_folder(Stage(stage.seed, None, 0)))
    if dense is None:
        raise DataError(f"{stage.name} learns from the dense network, which is not done", fix="run the recipe again")
    model = module_of(context, dense).eval().requires_grad_(False)
    return Teacher(model, spec.weight, spec.temperature)


def _stop_if_signalled(context: RunContext) -> None:
    (asked,) = max_over_processes(context.processes, (context.stop_signal() or 0,))
    if asked:
        raise Interrupted(asked)


def _restored(
    context: RunContext, stage: Stage, tensors: Mapping[str, Tensor], values: Values
) -> tuple[TrainState, float]:
    """The state in a checkpoint, and the seconds spent before it. The sums go to the leader."""
    state = _new_state(context, stage, network_from_tensors(tensors))
    entries: dict[int, dict[str, Any]] = {}
    for key, tensor in strip_prefix(tensors, OPTIMIZER).items():
        index, _, name = key.partition(".")
        entries.setdefault(int(index), {})[name] = tensor
    state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": entries})
    for parameter, kept in state.optimizer.state.items():  # fused steps want the memory layout of the parameter
        kept.update({n: torch.empty_like(parameter).copy_(t) for n, t in kept.items() if t.shape == parameter.shape})
    if context.processes.is_leader:
        state.sums.copy_(tensors[SUMS])
    state.epoch, state.step = values["epoch"], values["step"]
    state.rows = tuple(from_json(EpochRow, row, "a checkpoint's row") for row in values["rows"])
    state.facts = values["facts"]
    return state, float(values["seconds"])
