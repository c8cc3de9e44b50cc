"""The walk of a run: its plan, and for each stage that is not done yet: prepare a network, train it, record it.

In a stage's folder:  prepare -> start.* -> train (step-*.*) -> final.*, each of which is not made twice. What a network
is prepared from, and whether its masks change while it is trained, says the recipe's pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sipp.errors import DataError
from sipp.experiments.parallel.processes import Processes, add_up, check_same, from_leader, largest_of, share_buffers
from sipp.experiments.pipelines import Pipeline, parent_of, pipeline_of
from sipp.experiments.pipelines.shared import accuracy_values
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.plan import Stage, plan
from sipp.experiments.runs.work import Network, Prepared, Work, below, initial_network, module_of, network_of
from sipp.experiments.training.distill import Teacher
from sipp.experiments.training.feed import n_steps
from sipp.experiments.training.loop import Hyper, MaskChanges, TrainState, new_state, set_masks, train
from sipp.experiments.training.population import Member, Program, check_alone, fits, make_program, train_together
from sipp.experiments.training.signals import Interrupted
from sipp.experiments.training.step import training_stream
from sipp.native.compiling import compiling_seconds
from sipp.pruning.masking import release
from sipp.records.schemas import EpochRow, NetworkRecord, checked, given_values
from sipp.storage.files import Values
from sipp.storage.pairs import save_pair

OPTIMIZER = "optimizer."
SUMS = "sums"


def make_networks(work: Work) -> Generator[Stage, None, None]:
    """Each stage that had to be made, once it is done; those done before are only looked at."""
    if work.recipe.train.together > 1:
        yield from make_populations(work)
        return
    for stage in plan(work.recipe):
        if finished(work.processes, work.store.stage(stage.name)) is None:
            yield from make_network(work, stage)


def make_network(work: Work, stage: Stage) -> Iterator[Stage]:
    """The stages made on the way to this one, which is the last: itself, and its parents if they were damaged."""
    if finished(work.processes, work.store.stage(stage.name)) is not None:
        return
    pipeline, parent = pipeline_of(work.recipe.pipeline), parent_of(work.recipe.pipeline, stage)
    if parent is not None:
        yield from make_network(work, parent)  # at once if it is done, as it is in the order of the plan
    prepared = _prepared(work, stage, pipeline, parent)
    _stop_if_asked(work)
    with training_stream(work.feed.device):
        begun = _begun(work, stage, pipeline, prepared)
        _record(work, stage, begun, _train(work, stage, begun))
    yield stage


def finished(processes: Processes, folder: Path) -> Network | None:
    """A stage's result if it was done before and is sound; checkpoints that a kill left beside it are dropped."""
    found = from_leader(processes, lambda: runs.load_if_sound(folder, runs.FINAL))
    if found is None:
        return None
    from_leader(processes, lambda: runs.drop_checkpoints(folder))
    return network_of(found[0])


def _prepared(work: Work, stage: Stage, pipeline: Pipeline, parent: Stage | None) -> Prepared:
    """The network that training starts from: as it was saved, or made now and saved."""
    folder, clock, compiled = work.store.stage(stage.name), time.monotonic(), compiling_seconds()
    saved = from_leader(work.processes, lambda: runs.load_if_sound(folder, runs.START))
    if saved is not None:
        return Prepared(network_of(saved[0]), dict(saved[1]))
    if stage.method is None:
        made = Prepared(initial_network(work, stage.seed), {})
    else:
        above = None if parent is None else finished(work.processes, work.store.stage(parent.name))
        made = pipeline.prepare(work, stage, above)
    tensors, facts = made.network.tensors(), {**made.facts, "seconds": time.monotonic() - clock}
    if "part_seconds" in facts:
        facts["part_seconds"] = {**facts["part_seconds"], "compile": compiling_seconds() - compiled}
    check_same(work.processes, tensors, what="weights and masks")
    from_leader(work.processes, lambda: save_pair(folder, runs.START, tensors, facts))
    return Prepared(made.network, facts)


@dataclass(frozen=True)
class _Begun:
    """A stage whose training begins, or goes on from its newest checkpoint."""

    state: TrainState
    changes: MaskChanges | None
    facts: Values  # what was known before training
    parts: dict[str, float]  # seconds of what came before training
    prepared_in: float
    spent: float  # seconds, all in all


def _begun(work: Work, stage: Stage, pipeline: Pipeline, prepared: Prepared) -> _Begun:
    folder, facts = work.store.stage(stage.name), dict(prepared.facts)
    hyper = work.hyper(stage)
    state = new_state(module_of(work, prepared.network), hyper, masks=prepared.network.masks or None)
    spent = prepared_in = float(facts.pop("seconds"))
    parts = facts.pop("part_seconds", {})
    newest = from_leader(work.processes, lambda: runs.newest_checkpoint(folder))
    if newest is not None:
        spent = _restore(state, *newest, leads=work.processes.leads)
    changes = None
    if pipeline.mask_changes is not None and stage.method is not None:
        n_all = hyper.epochs * n_steps(work.feed, hyper.batch_size)
        changes = pipeline.mask_changes(work, stage, n_all)
    return _Begun(state, changes, facts, parts, prepared_in, spent)


def _record(work: Work, stage: Stage, begun: _Begun, seconds: float) -> None:
    """Saves the trained network and its record, which ends the stage."""
    state = begun.state
    cuts = state.facts.pop("part_seconds", {})  # of masks that changed on the way
    parts = {**begun.parts, **cuts, "train": seconds - begun.prepared_in - sum(cuts.values())}
    facts = {**begun.facts, **state.facts}
    release(state.model)
    tensors = {key: tensor.detach().cpu() for key, tensor in state.model.state_dict().items()}
    result = Network(tensors, state.masks)
    recipe, final = work.recipe, state.rows[-1].test
    assert final is not None
    values = {
        "kind": "dense" if stage.method is None else "level",
        "recipe": recipe.name,
        "pipeline": recipe.pipeline,
        "net": recipe.net,
        "data": recipe.data.name,
        "seed": stage.seed,
        "method": stage.method,
        "level": stage.level,
        **facts,
        "after": accuracy_values(final),
        "train_loss": state.rows[-1].train_loss,
        "seconds": round(seconds, 3),
        "part_seconds": {name: round(part, 3) for name, part in parts.items()},
    }
    for layer in values.get("layers", []):
        layer["nnz"] = int(torch.count_nonzero(tensors[layer["name"]]))
    record = given_values(checked(NetworkRecord, values, f"the record of {stage.name}"))
    saved = {"record": record, "epochs": [given_values(row) for row in state.rows]}
    check_same(work.processes, result.tensors(), what="trained weights")
    folder = work.store.stage(stage.name)
    from_leader(work.processes, lambda: runs.finish_stage(folder, result.tensors(), saved))


# --- many stages at once ----------------------------------------------------------------------------------------------


def make_populations(work: Work) -> Generator[Stage, None, None]:
    """Each stage that had to be made: those whose parents are done, as many side by side as the recipe says."""
    check_alone(work.processes, work.feed)
    at_once = work.recipe.train.together
    programs: list[Program] = []
    depths = {stage: _depth(work.recipe.pipeline, stage) for stage in plan(work.recipe)}
    for kind in sorted(set(depths.values())):
        todo = [
            stage
            for stage, depth in depths.items()
            if depth == kind and finished(work.processes, work.store.stage(stage.name)) is None
        ]
        for start in range(0, len(todo), at_once):
            yield from _make_population(work, todo[start : start + at_once], programs)


def _depth(pipeline: str, stage: Stage) -> int:
    """How many stages lie between this one and the initial network; the dense one comes first, it may teach."""
    parent = parent_of(pipeline, stage)
    return int(stage.method is not None) if parent is None else 1 + _depth(pipeline, parent)


def _make_population(work: Work, stages: Sequence[Stage], programs: list[Program]) -> Iterator[Stage]:
    """These stages, trained by one program, the last one's if that fits: it is kept for the next.

    Each stage's seconds of training are an equal share of all.
    """
    pipeline, hyper = pipeline_of(work.recipe.pipeline), work.hyper(stages[0])
    begun = []
    with training_stream(work.feed.device):
        for stage in stages:
            prepared = _prepared(work, stage, pipeline, parent_of(work.recipe.pipeline, stage))
            begun.append(_begun(work, stage, pipeline, prepared))
            _stop_if_asked(work)
        if len({(one.state.epoch, one.state.step) for one in begun}) > 1:  # killed while their checkpoints were saved
            for stage in stages:
                runs.drop_checkpoints(work.store.stage(stage.name))
            yield from _make_population(work, stages, programs)
            return
        seconds = _train_population(work, stages, begun, hyper, programs)
        for stage, one in zip(stages, begun):
            _record(work, stage, one, one.spent + seconds)
    yield from stages


def _train_population(
    work: Work, stages: Sequence[Stage], begun: Sequence[_Begun], hyper: Hyper, programs: list[Program]
) -> float:
    """The seconds that training took, by member; it is saved at the ends of epochs, and can be stopped there."""
    began = last_saved = time.monotonic()

    def on_epoch() -> None:
        nonlocal last_saved
        for stage, one in zip(stages, begun):
            work.on_epoch(stage.name, one.state.rows[-1])
        asked, is_due = work.wish(), time.monotonic() - last_saved >= work.checkpoint_seconds
        if (asked or is_due) and begun[0].state.epoch < hyper.epochs:
            for stage, one in zip(stages, begun):
                _save(work, stage, one.state, one.spent + (time.monotonic() - began) / len(stages))
            last_saved = time.monotonic()
        if asked:
            raise Interrupted(asked)

    members = [Member(one.state, stage.seed, one.changes) for stage, one in zip(stages, begun)]
    teachers = [teacher for stage in stages if (teacher := _teacher(work, stage)) is not None]
    if teachers or not programs or not fits(programs[-1], members, hyper):
        programs[:] = [make_program(members, work.feed, hyper, teachers)]
    train_together(programs[-1], members, work.feed, on_epoch=on_epoch)
    return (time.monotonic() - began) / len(stages)


# --- training that can be stopped at any moment -----------------------------------------------------------------------


def _train(work: Work, stage: Stage, begun: _Begun) -> float:
    """The seconds spent on this stage by all processes that worked on it, once its network is trained."""
    began = last_saved = time.monotonic()
    hyper, spent = work.hyper(stage), begun.spent

    def save(state: TrainState) -> None:
        nonlocal last_saved
        _save(work, stage, state, spent + time.monotonic() - began)
        last_saved = time.monotonic()

    def on_step(state: TrainState) -> None:
        if state.step == 0:
            work.on_epoch(stage.name, state.rows[-1])
        is_due = time.monotonic() - last_saved >= work.checkpoint_seconds and state.epoch < hyper.epochs
        asked, due = largest_of(work.processes, (work.wish() or 0, is_due and work.processes.leads))
        if asked or due:
            save(state)
        if asked:
            raise Interrupted(asked)

    try:
        train(
            begun.state,
            work.feed,
            hyper,
            seed=stage.seed,
            on_step=on_step,
            changes=begun.changes,
            processes=work.processes,
            teacher=_teacher(work, stage),
        )
    except DataError:
        # Ctrl-C reaches the processes that decode images too: their death is no fault then. Only fetching a batch
        # raises DataError, so the state is that after a whole step.
        asked = work.wish()
        if asked is None or work.processes.count > 1:
            raise
        save(begun.state)
        raise Interrupted(asked) from None
    return spent + time.monotonic() - began


def _save(work: Work, stage: Stage, state: TrainState, seconds: float) -> None:
    """Saves a checkpoint, from which training goes on to the same bits."""
    tensors, values = _captured(work.processes, state)
    name, folder = runs.step_name(state.epoch, state.step), work.store.stage(stage.name)
    values["seconds"] = seconds
    from_leader(work.processes, lambda: runs.save_checkpoint(folder, name, tensors, values))


def _teacher(work: Work, stage: Stage) -> Teacher | None:
    """The dense network of the stage's seed, where the recipe has its outputs learned in retraining."""
    spec = None if work.recipe.retrain is None else work.recipe.retrain.distill
    if spec is None or stage.method is None:
        return None
    dense = finished(work.processes, work.store.stage(Stage(stage.seed, None, 0).name))
    if dense is None:
        raise DataError(f"{stage.name} learns from the dense network, which is not done", fix="run the recipe again")
    model = module_of(work, dense).eval().requires_grad_(False)
    return Teacher(model, spec.weight, spec.temperature)


def _stop_if_asked(work: Work) -> None:
    (asked,) = largest_of(work.processes, (work.wish() or 0,))
    if asked:
        raise Interrupted(asked)


def _captured(processes: Processes, state: TrainState) -> tuple[dict[str, Tensor], Values]:
    """All that training needs to go on, as tensors and as plain values; nothing random is part of it."""
    share_buffers(processes, state.model)
    tensors = Network(dict(state.model.state_dict()), state.masks).tensors()
    tensors[SUMS] = add_up(processes, state.sums)
    for index, entries in state.optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{index}.{key}"] = value
            elif value is not None:
                raise DataError(f"the optimizer's {key!r} is a {type(value).__name__}: only tensors can be saved")
    values = {"epoch": state.epoch, "step": state.step, "rows": [given_values(row) for row in state.rows]}
    return tensors, {**values, "facts": state.facts}


def _restore(state: TrainState, tensors: Mapping[str, Tensor], values: Values, *, leads: bool) -> float:
    """The seconds spent before; the state is the saved one. The sums of all processes go to the leader."""
    saved = network_of(tensors)
    if saved.masks:
        set_masks(state, saved.masks)
    state.model.load_state_dict(saved.state)
    entries: dict[int, dict[str, Any]] = {}
    for key, tensor in below(tensors, OPTIMIZER).items():
        index, _, name = key.partition(".")
        entries.setdefault(int(index), {})[name] = tensor
    state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": entries})
    if leads:
        state.sums.copy_(tensors[SUMS])
    state.epoch, state.step = values["epoch"], values["step"]
    state.rows = tuple(checked(EpochRow, row, "a checkpoint's row") for row in values["rows"])
    state.facts = values.get("facts", {})  # a checkpoint of a version whose masks never changed has none
    return float(values["seconds"])
