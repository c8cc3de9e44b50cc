"""The command `sipp bench`: a stored network against the dense one; or the kernels of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import (
    MACHINE_PANEL,
    MODEL_PANEL,
    OUTPUT_PANEL,
    Device,
    Force,
    Json,
    Normalise,
    Size,
    Weights,
    option,
)
from sipp.cli.output import only_json, plain_table, print_json, show
from sipp.records.display import bytes_in_words
from sipp.records.schemas import BenchRecord
from sipp.storage.outputs import BENCH_NAME

REPEATS, MOST_REPEATS = 5, 1000
SCORED, N_POINTS, MOST_POINTS, MOST_THREADS = "resnet20", 64, 4096, 1024


def bench(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A file of sipp.save, or a folder of `sipp prune`; without: kernels and scoring are timed."
        ),
    ] = None,
    model: Annotated[
        str | None,
        option("Built-in network or package.module:callable; of FILE, built-in ones are recognised.", MODEL_PANEL),
    ] = None,
    weights: Weights = None,
    data: Annotated[str | None, option("Points; default: noise of a built-in network's shape.", MODEL_PANEL)] = None,
    normalise: Normalise = None,
    size: Size = None,
    out: Annotated[
        Path | None, option(f"New file for the record; as {BENCH_NAME} in a folder, the page shows it.", OUTPUT_PANEL)
    ] = None,
    force: Force = False,
    as_json: Json = False,
    device: Device = "auto",
    batch: Annotated[
        int | None,
        option(f"Points of a call with FILE; default: {N_POINTS}.", MACHINE_PANEL, least=1, most=MOST_POINTS),
    ] = None,
    threads: Annotated[
        int | None, option("Threads with FILE; default: as torch has them.", MACHINE_PANEL, least=1, most=MOST_THREADS)
    ] = None,
    repeats: Annotated[
        int, option("Times each is measured; the best counts.", MACHINE_PANEL, least=1, most=MOST_REPEATS)
    ] = REPEATS,
) -> None:
    """Time a stored network against the dense one; or kernels and scoring, after checking that they are right."""
    if file is None:
        for option, value in (("--batch", batch), ("--threads", threads), ("--out", out)):
            if value is not None:
                raise CommandError("it is for a stored network", where=option, fix="give FILE, or leave it out")
        _kernels(model or SCORED, weights, data, normalise, size, repeats, device, as_json)
        return
    if weights is not None or device == "cuda":
        option = "--weights" if weights is not None else "--device cuda"
        raise CommandError("FILE holds the weights, and is run on the CPU", where=option, fix="leave it out")
    from sipp.cli.data_option import points_read
    from sipp.records.json_values import json_value
    from sipp.storage.files import seal
    from sipp.storage.outputs import BENCH, check_file, write_file

    with only_json(as_json):
        if out is not None:
            with naming_option(f"--out {out}", "give another place"):
                check_file(out, BENCH, force=force, inputs=[("FILE", file), *points_read("--data", data)])
        from sipp.cli.bench_network import bench_file

        record = bench_file(
            file,
            model=model,
            data=data,
            normalise=normalise,
            size=size,
            n_points=batch or N_POINTS,
            n_threads=threads,
            repeats=repeats,
        )
        values = json_value(record.model_dump(mode="json"))
        if out is not None:
            with naming_option(f"--out {out}", "give another place"):
                write_file(out, json.dumps(seal(values), indent=1, allow_nan=False).encode(), BENCH, force=force)
        if not as_json:
            _tell(record, out)
    if as_json:
        print_json(values)


def _tell(record: BenchRecord, out: Path | None) -> None:
    """Prints the tables, and the three numbers on the last line."""
    show(f"{record.network} on {record.machine}, {record.n_threads} {'thread' if record.n_threads == 1 else 'threads'}")
    if record.images is not None:
        show(record.images)
    steps = plain_table("step", "kernel", "kept", "bytes dense", "bytes", "ms dense", "ms", "ratio", texts=("kernel",))
    for step in record.steps:
        is_timed = step.dense_ms is not None and step.sparse_ms is not None
        steps.add_row(
            step.name,
            step.kernel,
            "" if step.keep is None else f"{step.keep:.2%}",
            f"{step.n_dense_bytes:,}",
            f"{step.n_bytes:,}",
            f"{step.dense_ms:.3f}" if step.dense_ms is not None else "",
            f"{step.sparse_ms:.3f}" if step.sparse_ms is not None else "",
            f"{step.dense_ms / step.sparse_ms:.2f}" if is_timed and step.sparse_ms and step.dense_ms else "",
        )
    show(f"steps with weights, {record.step_points} points, one thread:", steps)
    calls = plain_table("points", "dense ms", "sparse ms", "dense points/s", "sparse points/s", "ratio", "off by")
    for run in record.runs:
        rates = (f"{1e3 * run.n_points / ms:,.0f}" for ms in (run.dense_ms, run.sparse_ms))
        times = (f"{run.dense_ms:.3f}", f"{run.sparse_ms:.3f}")
        calls.add_row(str(run.n_points), *times, *rates, f"{run.ratio:.2f}", f"{run.off_by:.0e}")
    show("calls:", calls)
    show("  ratio: how many times faster than dense; off by: how far outputs are from dense ones, by their size")
    found = record.bytes
    show(
        f"bytes:           {bytes_in_words(found.file)} stored, {bytes_in_words(round(found.bound))} by values and "
        f"entropy, {bytes_in_words(found.dense)} dense; weights in memory {bytes_in_words(found.memory)}, "
        f"dense {bytes_in_words(found.memory_dense)}"
    )
    if out is not None:
        show(f"written:         {out}")
    show(record.line)


def _kernels(
    model: str,
    weights: Path | None,
    data: str | None,
    normalise: str | None,
    size: int | None,
    repeats: int,
    device: str,
    as_json: bool,
) -> None:
    """Times the kernels, and the scoring of a network against its forward pass."""
    from sipp.cli.bench_kernels import measure

    with only_json(as_json):
        machine, lines, images = measure(model, weights, data, normalise, size, device, repeats)
        if not as_json:
            table = plain_table("what", "size", "torch ms", "sipp ms", "ratio", "off by")
            for line in lines:
                times = (f"{line[key]:.2f}" for key in ("torch_ms", "sipp_ms"))
                table.add_row(line["what"], line["size"], *times, f"{line['ratio']:.2f}", f"{line['off_by']:.0e}")
            show(f"{machine}; best of {repeats}, measured in turns", *images, table)
            show("kernel: max-times product over matmul of the same shape; network: scoring over one forward pass")
    if as_json:
        print_json({"kind": "bench", "sipp": sipp.__version__, "machine": machine, "lines": lines})
