"""What `sipp bench` left beside a pruned network -> the section "Size and speed" of its page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sipp.records.schemas import BenchRecord, BenchStep
from sipp.report.plots import Plot
from sipp.report.read import PrunedModel
from sipp.report.words import Finding, is_useless, number

BENCH = ("size", "speed")  # its plots, in order
# What a step is shown by: its label, its unit, and the value of a step
STEP_VALUES: tuple[tuple[str, str, Callable[[BenchStep], float | None]], ...] = (
    ("times faster", "number", lambda step: _ratio(step)),
    ("milliseconds dense", "number", lambda step: step.dense_ms),
    ("milliseconds sparse", "number", lambda step: step.sparse_ms),
    ("bytes dense", "count", lambda step: float(step.n_dense_bytes)),
    ("bytes sparse", "count", lambda step: float(step.n_bytes)),
)


def bench_finding(bench: BenchRecord) -> Finding:
    """How much smaller and faster, and how that was measured."""
    best = bench.runs[-1]
    heading = f"{bench.smaller:.2f} times smaller as a file of sipp.save, {best.ratio:.2f} times faster"
    if best.ratio < 1:
        heading = f"{bench.smaller:.2f} times smaller as a file of sipp.save, and no faster"
    n_threads = f"{bench.n_threads} thread{'' if bench.n_threads == 1 else 's'}"
    return Finding(
        heading,
        f"Against the same network run dense by torch in its better memory format, in turns, {best.n_points:,} points "
        f"a call, {n_threads} of {bench.machine}. Steps are timed on one thread, "
        f"{bench.step_points:,} points at a time.",
    )


def bench_plots(pruned: PrunedModel, ident: str) -> dict[str, Plot]:
    """Bytes and calls in words and numbers, and every step with weights; none without a record."""
    bench = pruned.bench
    if bench is None:
        return {}
    size: Plot = {"kind": "facts", "title": "Size and speed", "choices": [], "views": _cards(bench, pruned)}
    views = []
    for what, unit, value in STEP_VALUES:
        values = [value(step) for step in bench.steps]
        y = {"label": what, "unit": unit, "log": False}
        views.append({"y": y, "series": [{"name": pruned.arm, "values": values}]})
    choices = [{"label": "Show", "options": [what for what, _, _ in STEP_VALUES]}]
    names = [step.name for step in bench.steps]
    speed = {
        "kind": "bars",
        "title": "Step by step",
        "label": "step",
        "names": names,
        "choices": choices,
        "views": views,
    }
    return {key: {"id": f"{ident}-{key}", **plot} for key, plot in zip(BENCH, (size, speed))}


def _cards(bench: BenchRecord, pruned: PrunedModel) -> list[dict[str, Any]]:
    found = bench.bytes
    stored = [
        ["stored", f"{found.file:,} bytes"],
        ["values and entropy", f"{found.bound:,.0f} bytes"],
        ["dense", f"{found.dense:,} bytes"],
        ["weights in memory", f"{found.memory:,} bytes"],
        ["dense in memory", f"{found.memory_dense:,} bytes"],
    ]
    cards: list[dict[str, Any]] = [
        {
            "title": "Bytes",
            "text": "Values and entropy: the kept values, and n H(keep) bits for positions.",
            "rows": stored,
        }
    ]
    for run in bench.runs:
        rates = [1e3 * run.n_points / ms for ms in (run.dense_ms, run.sparse_ms)]
        rows = [
            ["dense", f"{number(run.dense_ms)} ms, {rates[0]:,.0f} points/s"],
            ["sparse", f"{number(run.sparse_ms)} ms, {rates[1]:,.0f} points/s"],
            ["times faster", f"{run.ratio:.2f}"],
            ["outputs differ by", number(run.off_by)],
        ]
        title = "One point a call" if run.n_points == 1 else f"{run.n_points:,} points a call"
        cards.append({"title": title, "text": "", "rows": rows})
    limit = None if pruned.record.certificate is None else pruned.record.certificate.limit
    useless = bool(bench.certified) and limit is not None and is_useless(limit)
    title = "Useless certificate" if useless else "Certified"
    text = bench.certified or "Nothing of the stored values."
    cards.append({"title": title, "text": text, "rows": [], "useless": useless})
    return cards


def _ratio(step: BenchStep) -> float | None:
    return step.dense_ms / step.sparse_ms if step.dense_ms and step.sparse_ms else None
