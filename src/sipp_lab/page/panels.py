"""Panels: runs that differ only in seeds or methods are one; others are told apart by what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sipp.report import flatten
from sipp_lab.runs.folder import Run
from sipp_lab.runs.records import NetworkRecord

# Differences that titles do not mention: details of the schedule, and how (not to what) networks are trained, also in
# the published runs (train.together, train.step).
QUIET = {"name", "train.eval_every", "train.warmup_epochs", "train.decay.milestones", "train.together", "train.step"}
LISTS = ("seed", "repetitions")  # keys that say which networks there are, not what they are


@dataclass(frozen=True)
class Panel:
    """One network, data set and pipeline, with its runs merged into one."""

    title: str
    run: Run
    folders: tuple[str, ...]


def network_and_data(run: Run) -> str:
    """Which network on which data; published runs have the names of the user's own code apart."""
    code = run.config.get("code") or {}
    return f"{code.get('net') or run.config['net']} on {code.get('data') or run.config['data']['name']}"


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Groups the runs into panels, in the order of their first runs."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if _same_setting(group[0], run) and all(_agree(other, run) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    joined = [_merge(group) for group in groups]
    titles = _titles(joined)
    return [Panel(title, run, tuple(o.name for o in group)) for title, run, group in zip(titles, joined, groups)]


def _comparable_config(run: Run) -> dict[str, Any]:
    """The configuration without seeds and methods."""
    prune = {key: value for key, value in run.config["prune"].items() if key != "methods"}
    return {**{key: value for key, value in run.config.items() if key not in LISTS}, "prune": prune}


def _same_setting(run: Run, other: Run) -> bool:
    same_data = {origin.data for origin in run.origins} == {origin.data for origin in other.origins}
    return same_data and _comparable_config(run) == _comparable_config(other)


def _agree(run: Run, other: Run) -> bool:
    """Whether the networks that both runs contain are identical; otherwise they cannot share a panel."""
    first, second = _records_by_key(run), _records_by_key(other)
    return all(
        replace(first[key], seconds=0.0) == replace(second[key], seconds=0.0) for key in first.keys() & second.keys()
    )


def _records_by_key(run: Run) -> dict[tuple[int, str | None, int], NetworkRecord]:
    return {(record.seed, record.method, record.level): record for record in run.records}


def _merge(group: Sequence[Run]) -> Run:
    if len(group) == 1:
        return group[0]
    records: dict[tuple[int, str | None, int], NetworkRecord] = {}
    methods: dict[str, None] = {}
    for run in group:
        records = {**_records_by_key(run), **records}
        methods |= dict.fromkeys(run.config["prune"]["methods"])
    config = {**group[0].config, "prune": {**group[0].config["prune"], "methods": list(methods)}}
    n_stages = len(records) + sum(run.n_stages - len(run.records) for run in group)
    return replace(group[0], config=config, records=tuple(records.values()), n_stages=n_stages)


def _titles(runs: Sequence[Run]) -> list[str]:
    """The titles: network, data and pipeline, plus the settings that differ if that is ambiguous."""
    short = [f"{network_and_data(run)}, {run.config['pipeline']}" for run in runs]
    configs = [dict(flatten(_comparable_config(run))) for run in runs]
    titles = []
    for title, own in zip(short, configs):
        namesakes = [config for config, other in zip(configs, short) if other == title]
        differ = [key for key, value in own.items() if any(one.get(key) != value for one in namesakes)]
        shown = [key for key in sorted(set(differ) - QUIET) if own[key] is not None]
        ends = [key.rpartition(".")[2] for key in shown]
        names = [end if ends.count(end) == 1 else key for key, end in zip(shown, ends)]  # train.epochs, retrain.epochs
        words = [f"{name} {own[key]}" for name, key in zip(names, shown)]
        titles.append(title + (f" ({', '.join(words)})" if words else ""))
    ends = [f"run {run.name.rpartition('-')[2]}" for run in runs]  # the hash in its name
    return [title if titles.count(title) == 1 else f"{title}, {end}" for title, end in zip(titles, ends)]
