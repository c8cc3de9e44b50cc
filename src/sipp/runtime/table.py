"""The steps of a plan as a table: what runs where, how many weights are left, how long it takes."""

from __future__ import annotations

from rich import box
from rich.table import Table

from sipp.records.display import text_of
from sipp.runtime.graph import reads_memory
from sipp.runtime.plan import Plan
from sipp.runtime.plan_cache import Compiled
from sipp.runtime.steps import Step

MS, MB = 1e3, 1e6


def steps_table(steps: list[Step], *, with_notes: bool) -> str:
    """One line for every step, and what is left to torch."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("node", overflow="fold")
    table.add_column("kernel")
    for column in ("kept", "kB dense", "kB here", "ms dense", "ms here"):
        table.add_column(column, justify="right")
    if with_notes:
        table.add_column("why", overflow="fold")
    for step in steps:
        if with_notes and step.kernel == "torch" and not step.note:
            continue  # listed below
        table.add_row(
            step.name, step.kernel,
            "" if step.keep is None else f"{step.keep:.2%}",
            *(f"{n / 1e3:,.1f}" if n else "" for n in (step.n_dense_bytes, step.n_bytes)),
            *("" if t is None else f"{t * MS:.3f}" for t in (step.dense_seconds, step.seconds)),
            *([step.note] if with_notes else []),
        )  # fmt: skip
    by_torch = sorted({step.name.rstrip("_0123456789") for step in steps if step.kernel == "torch"})
    return f"{text_of(table)}\nleft to torch:  {', '.join(by_torch) or 'nothing'}"


def sparse_table(plan: Plan, compiled: Compiled, n_bytes: int, n_dense_bytes: int, seconds: float) -> str:
    """One line for every step, and what it comes to."""
    ran = "as above" if compiled.chunk is None else f"as above, {compiled.chunk} points at a time"
    if compiled.is_dense:
        ran = "torch runs all of it, which is faster here"
        if reads_memory(plan.graph):
            ran = "torch runs all of it: an operation takes values as they lie in memory"
        elif not compiled.is_finite:
            ran = "torch runs all of it: a value on the way was not finite, which only the model itself passes on"
    return "\n".join((
        steps_table(plan.steps, with_notes=False),
        f"network:        {ran}; {compiled.seconds * MS:.3f} ms a call, dense {compiled.dense_seconds * MS:.3f} ms "
        f"({compiled.dense_seconds / compiled.seconds:.2f} x)",
        f"weights:        {n_bytes / MB:.2f} MB, dense {n_dense_bytes / MB:.2f} MB; "
        f"activations {plan.arena.n_bytes / MB:.2f} MB",
        f"compiled in:    {seconds:.1f} s; times of steps are those of one thread, of the network those of all",
    ))  # fmt: skip
