"""Prints a compiled network: a table of its steps with kernels, sizes and times."""

from __future__ import annotations

from sipp.results import Table
from sipp.runtime.plan_cache import Compiled
from sipp.runtime.steps import MS, Step

MB = 1e6
Labels = tuple[tuple[str, str], ...]  # labels and texts


def steps_table(steps: list[Step], *, with_notes: bool = False) -> Table:
    """One line per step; with notes, steps left to torch appear only if there is a reason."""
    columns = ("node", "kernel", "kept", "kB dense", "kB here", "ms torch", "ms here", *(["why"] if with_notes else []))
    rows = tuple(
        (
            step.name,
            step.kernel,
            "" if step.keep is None else f"{step.keep:.2%}",
            *(f"{n / 1e3:,.1f}" if n else "" for n in (step.n_dense_bytes, step.n_bytes)),
            *("" if t is None else f"{t * MS:.3f}" for t in (step.dense_seconds, step.seconds)),
            *([step.note] if with_notes else []),
        )
        for step in steps
        if step.kernel != "torch" or step.note or not with_notes
    )
    return Table(columns, rows, texts=("kernel", "why"), bars=("ms torch", "ms here"))


def left_to_torch(steps: list[Step]) -> str:
    """The kinds of operations that torch runs."""
    return ", ".join(sorted({step.name.rstrip("_0123456789") for step in steps if step.kernel == "torch"})) or "nothing"


def summary_labels(compiled: Compiled, n_bytes: int, n_dense_bytes: int, seconds: float, timed: str) -> Labels:
    """The lines below the table: what runs, how fast, and how much memory it takes; `timed` says how this was timed."""
    times = f"{compiled.seconds * MS:.3f} ms per call, torch {compiled.dense_seconds * MS:.3f} ms"
    if compiled.one_thread_seconds is not None:
        times += f" (one thread {compiled.one_thread_seconds * MS:.3f} ms)"
    memory = f"{n_bytes / MB:.2f} MB, dense {n_dense_bytes / MB:.2f} MB"
    buffers = f"; activations {compiled.n_buffer_bytes / MB:.2f} MB" if compiled.n_buffer_bytes else ""
    return (
        ("left to torch", left_to_torch(compiled.steps) if compiled.steps else "everything"),
        ("network", compiled.how if compiled.is_dense else f"{compiled.how}; {times}: {compiled.speed}"),
        ("weights", memory + buffers),
        ("compiled in", f"{seconds:.1f} s; {timed}"),
    )
