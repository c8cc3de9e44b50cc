"""One stage of a run: a network is prepared, trained to the end and saved; each part returns at once if it was done.

prepare -> start.* -> train (step-*.*) -> final.*
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError
from sipp.experiments.nets import build
from sipp.experiments.parallel.processes import ALONE, Team, add_up, check_same, from_leader, largest_of, share_buffers
from sipp.experiments.runs import store as runs
from sipp.experiments.training.feed import Feed
from sipp.experiments.training.loop import Accuracy, EpochRow, Hyper, TrainState, new_state, train
from sipp.experiments.training.signals import Interrupted, Wish
from sipp.experiments.training.step import training_stream
from sipp.pruning.masking import release
from sipp.storage.files import Values
from sipp.storage.pairs import save_pair

MODEL = "model."
MASK = "mask."
OPTIMIZER = "optimizer."
SUMS = "sums"


@dataclass(frozen=True)
class Network:
    """A network's tensors on the CPU: its state_dict, and the masks of its prunable weights (empty if dense)."""

    state: dict[str, Tensor]
    masks: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Both in one dictionary, as they are saved."""
        states = {MODEL + key: tensor for key, tensor in self.state.items()}
        return {**states, **{MASK + key: tensor for key, tensor in self.masks.items()}}


@dataclass(frozen=True)
class Prepared:
    """What training starts from, and what is known before it."""

    network: Network
    facts: Values


@dataclass(frozen=True)
class Work:
    """What all stages of a run share."""

    net: str
    feed: Feed
    hyper: Hyper
    wish: Wish
    checkpoint_seconds: float
    on_epoch: Callable[[str, EpochRow], None]
    team: Team = ALONE


Describe = Callable[[Network, Values, tuple[EpochRow, ...]], Values]


def network_of(tensors: Mapping[str, Tensor]) -> Network:
    """The network saved in these tensors."""
    return Network(_below(tensors, MODEL), _below(tensors, MASK))


def module_of(work: Work, network: Network) -> nn.Module:
    """The network as a module on the device; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        model = build(work.net, n_classes=work.feed.n_classes)
    model.load_state_dict(network.state)
    if work.feed.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(work.feed.device)


def finished(team: Team, stage: Path) -> Network | None:
    """The stage's result if it was done before and is sound; checkpoints that a kill left beside it are dropped."""
    found = from_leader(team, lambda: runs.load_if_sound(stage, runs.FINAL))
    if found is None:
        return None
    from_leader(team, lambda: runs.drop_checkpoints(stage))
    return network_of(found[0])


def run_stage(work: Work, stage: Path, *, seed: int, prepare: Callable[[], Prepared], describe: Describe) -> Network:
    """The trained network of this stage, from wherever it was left; `describe` makes its record."""
    team = work.team
    done = finished(team, stage)
    if done is not None:
        return done
    clock = time.monotonic()
    saved = from_leader(team, lambda: runs.load_if_sound(stage, runs.START))
    if saved is None:
        prepared = prepare()
        network, facts = prepared.network, {**prepared.facts, "seconds": time.monotonic() - clock}
        check_same(team, network.tensors(), what="weights and masks")
        from_leader(team, lambda: save_pair(stage, runs.START, network.tensors(), facts))
    else:
        network, facts = network_of(saved[0]), dict(saved[1])
    _stop_if_asked(work)
    with training_stream(work.feed.device):
        return _train_and_finish(work, stage, network, facts, describe, seed=seed)


def _train_and_finish(
    work: Work, stage: Path, network: Network, facts: Values, describe: Describe, *, seed: int
) -> Network:
    team = work.team
    model = module_of(work, network)
    state = new_state(model, work.hyper, masks=network.masks or None)
    newest = from_leader(team, lambda: runs.newest_checkpoint(stage))
    spent = prepared_in = float(facts.pop("seconds"))
    parts = facts.pop("part_seconds", {})
    if newest is not None:
        spent = _restore(state, *newest, leads=team.leads)
    state, spent = _train(work, stage, state, network.masks, spent, seed=seed)
    release(model)
    result = Network({key: tensor.detach().cpu() for key, tensor in model.state_dict().items()}, network.masks)
    parts = {name: round(seconds, 3) for name, seconds in {**parts, "train": spent - prepared_in}.items()}
    record = {**describe(result, facts, state.rows), "seconds": round(spent, 3), "part_seconds": parts}
    values = {"record": record, "epochs": [asdict(row) for row in state.rows]}
    check_same(team, result.tensors(), what="trained weights")
    from_leader(team, lambda: runs.finish_stage(stage, result.tensors(), values))
    return result


def _train(
    work: Work, stage: Path, state: TrainState, masks: Mapping[str, Tensor], spent: float, *, seed: int
) -> tuple[TrainState, float]:
    """The trained state, and the seconds spent on this stage by all processes that worked on it."""
    began = last_saved = time.monotonic()

    def save(state: TrainState) -> None:
        nonlocal last_saved
        tensors, values = _captured(work.team, state, masks)
        values["seconds"] = spent + time.monotonic() - began
        name = runs.step_name(state.epoch, state.step)
        from_leader(work.team, lambda: runs.save_checkpoint(stage, name, tensors, values))
        last_saved = time.monotonic()

    def on_step(state: TrainState) -> None:
        if state.step == 0:
            work.on_epoch(stage.name, state.rows[-1])
        is_due = time.monotonic() - last_saved >= work.checkpoint_seconds and state.epoch < work.hyper.epochs
        asked, due = largest_of(work.team, (work.wish() or 0, is_due and work.team.leads))
        if asked or due:
            save(state)
        if asked:
            raise Interrupted(asked)

    try:
        train(state, work.feed, work.hyper, seed=seed, on_step=on_step, team=work.team)
    except DataError:
        # Ctrl-C reaches the processes that decode images too: their death is no fault then. Only fetching a batch
        # raises DataError, so the state is that after a whole step.
        asked = work.wish()
        if asked is None or work.team.count > 1:
            raise
        save(state)
        raise Interrupted(asked) from None
    return state, spent + time.monotonic() - began


def _stop_if_asked(work: Work) -> None:
    (asked,) = largest_of(work.team, (work.wish() or 0,))
    if asked:
        raise Interrupted(asked)


def _captured(team: Team, state: TrainState, masks: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Values]:
    """All that training needs to go on, as tensors and as plain values; nothing random is part of it."""
    share_buffers(team, state.model)
    tensors = Network(dict(state.model.state_dict()), dict(masks)).tensors()
    tensors[SUMS] = add_up(team, state.sums)
    for index, entries in state.optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{index}.{key}"] = value
            elif value is not None:
                raise DataError(f"the optimizer's {key!r} is a {type(value).__name__}: only tensors can be saved")
    return tensors, {"epoch": state.epoch, "step": state.step, "rows": [asdict(row) for row in state.rows]}


def _restore(state: TrainState, tensors: Mapping[str, Tensor], values: Values, *, leads: bool) -> float:
    """The seconds spent before; the state is the saved one. The sums of all processes go to the leader."""
    state.model.load_state_dict(_below(tensors, MODEL))
    entries: dict[int, dict[str, Any]] = {}
    for key, tensor in _below(tensors, OPTIMIZER).items():
        index, _, name = key.partition(".")
        entries.setdefault(int(index), {})[name] = tensor
    state.optimizer.load_state_dict({**state.optimizer.state_dict(), "state": entries})
    if leads:
        state.sums.copy_(tensors[SUMS])
    state.epoch, state.step = values["epoch"], values["step"]
    state.rows = tuple(epoch_row(row) for row in values["rows"])
    return float(values["seconds"])


def epoch_row(values: Values) -> EpochRow:
    """The row that `asdict` made these values of."""
    test = values["test"]
    return EpochRow(**{**values, "test": None if test is None else Accuracy(**test)})


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
