"""What commands show of recipes and runs: tables of networks, of runs, and of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sipp.results import Sheet, Table, words
from sipp_lab.runs.folder import RunStatus

Record = Mapping[str, Any]  # of a network


def records_sheet(records: Sequence[Record]) -> Sheet:
    """Test accuracy before and after training and multiply-adds of one input, a row per method and keep."""
    seeds = sorted({record["seed"] for record in records})
    lines: dict[tuple[str, int], dict[int, Record]] = {}
    for record in records:
        lines.setdefault((record["method"] or "dense", record["level"]), {})[record["seed"]] = record
    rows = []
    for (method, _), by_seed in lines.items():
        keep = f"{next(iter(by_seed.values()))['keep']:.2%}"
        dead = ", ".join(str(record["dead_rows"]) for record in by_seed.values())
        rows.append(
            (method, keep, _products(by_seed.values()), *(_accuracy(by_seed.get(seed)) for seed in seeds), dead)
        )
    columns = ("method", "keep", "multiply-adds", *(f"seed {seed}" for seed in seeds), "dead rows")
    return Sheet("test accuracy, pruned -> trained", tables=(Table(columns, tuple(rows)),))


def _products(records: Iterable[Record]) -> str:
    """The mean number of multiply-adds of one input."""
    counts = [record["multiply_adds"] for record in records if record.get("multiply_adds") is not None]
    return f"{sum(counts) / len(counts):,.0f}" if counts else ""


def _accuracy(record: Record | None) -> str:
    if record is None:
        return ""
    before = f"{record['before']['top1']:.2%} -> " if record["before"] else ""
    return f"{before}{record['after']['top1']:.2%}"


def work_done(n_trained: int) -> str:
    """How many networks were trained by this command."""
    return f"{words.counted(n_trained, 'network')} trained now" if n_trained else "nothing left to do"


def runs_sheet(runs: Sequence[RunStatus]) -> Sheet:
    """How far each run has got; broken ones with what to do."""
    rows = []
    for run in runs:
        note = "" if run.n_origins == 1 else f", {run.n_origins} origins (resumed with changes)"
        counts = "" if run.state == "broken" else f"{run.n_done} of {run.n_stages}"
        rows.append((run.folder.name, run.pipeline, counts, run.state + note))
    broken = " ".join(f"broken: {run.what}; {run.fix}." for run in runs if run.state == "broken")
    table = Table(("run", "pipeline", "networks", "state"), tuple(rows), texts=("pipeline", "state"))
    return Sheet(words.counted(len(runs), "run"), tables=(table,) if rows else (), note=broken)


def keys_sheet(name: str, rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """Every key of a recipe, its value in YAML notation, and what it means."""
    shown = tuple((row["key"], _as_yaml(row["value"]), row["meaning"]) for row in rows)
    return Sheet(name, tables=(Table(("key", "value", "meaning"), shown, texts=("value", "meaning")),))


def _as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
