"""`sipp bench`: times a stored network in the sparse runtime and in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import RenderableType

from sipp.cli.options import MACHINE_PANEL, OUTPUT_PANEL, Force, StoredOptions, option
from sipp.cli.output import Answer
from sipp.results.bench import BenchRecord
from sipp.results.display import bytes_in_words, labelled_line, plain_table
from sipp.storage.outputs import BENCH_NAME

LEAST_REPEATS, REPEATS, MOST_REPEATS = 5, 15, 1000  # with fewer there is no spread
N_POINTS, MOST_POINTS, MOST_THREADS = 64, 4096, 1024


def bench(
    *,
    stored: StoredOptions,
    out: Annotated[
        Path | None,
        option(
            f"New file for the record; as {BENCH_NAME} in the network's folder, it appears on the page.", OUTPUT_PANEL
        ),
    ] = None,
    force: Force = False,
    batch: Annotated[
        int, option("Inputs per call; a single input is timed too.", MACHINE_PANEL, least=1, most=MOST_POINTS)
    ] = N_POINTS,
    threads: Annotated[
        int | None, option("Threads; default: as many as torch uses.", MACHINE_PANEL, least=1, most=MOST_THREADS)
    ] = None,
    repeats: Annotated[
        int,
        option(
            "Pairs of calls to time; the median counts.",
            MACHINE_PANEL,
            least=LEAST_REPEATS,
            most=MOST_REPEATS,
        ),
    ] = REPEATS,
) -> Answer:
    """Time a pruned network in the sparse runtime and in PyTorch, step by step and as a whole."""
    from sipp.cli.out_option import check_out, write_record
    from sipp.results.json_values import json_value

    check_out(out, force=force, reads={"FILE": stored.file})
    from sipp.cli.bench_network import bench_file

    record = bench_file(stored, n_points=batch, n_threads=threads, repeats=repeats)
    values = json_value(record.model_dump(mode="json"))
    written = write_record(out, values, force=force)
    return Answer([*_tables(record), *written, record.line], values)


def _tables(record: BenchRecord) -> list[RenderableType]:
    """The times of steps and calls, and the sizes."""
    from sipp.report.numbers import counted

    columns = ("step", "kernel", "kept", "bytes dense", "bytes sparse", "ms torch", "ms sparse", "faster")
    steps = plain_table(*columns, texts=("kernel",))
    for step in record.steps:
        steps.add_row(
            step.name,
            step.kernel,
            "" if step.keep is None else f"{step.keep:.2%}",
            f"{step.n_dense_bytes:,}",
            f"{step.n_bytes:,}",
            f"{step.dense_ms:.3f}" if step.dense_ms is not None else "",
            f"{step.sparse_ms:.3f}" if step.sparse_ms is not None else "",
            f"{step.ratio:.2g} x" if step.ratio is not None else "",
        )
    calls = plain_table(
        "inputs", "ms torch", "ms sparse", "inputs/s torch", "inputs/s sparse", "off by", "speed", texts=("speed",)
    )
    for run in record.runs:
        rates = (f"{1e3 * run.n_points / ms:,.0f}" for ms in (run.dense_ms, run.sparse_ms))
        times = (f"{run.dense_ms:.3f}", f"{run.sparse_ms:.3f}")
        calls.add_row(str(run.n_points), *times, *rates, f"{run.off_by:.0e}", run.words)
    sizes = record.bytes
    return [
        f"{record.network} on {record.machine}, {counted(record.n_threads, 'thread')}",
        *([] if record.images is None else [record.images]),
        f"steps with weights, {record.step_points} inputs, one thread:",
        steps,
        "calls:",
        calls,
        "  torch: PyTorch running the same pruned network, zeros included; off by: relative difference of the outputs;",
        "  speed: the median over pairs of calls that take turns, and the range of the middle 80 %",
        labelled_line(
            "file",
            f"{bytes_in_words(sizes.file)}, before pruning {bytes_in_words(sizes.dense)} (values and the "
            f"entropy of their positions: {bytes_in_words(round(sizes.bound))})",
        ),
        labelled_line(
            "in memory",
            f"{bytes_in_words(sizes.memory)} of weights, before pruning {bytes_in_words(sizes.memory_dense)}",
        ),
    ]
