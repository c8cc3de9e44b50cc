"""`sipp bench`: times a stored network in the sparse runtime and in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import sipp
from sipp.cli.options import MACHINE_PANEL, OUTPUT_PANEL, Force, StoredOptions, option
from sipp.cli.output import Answer
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

    check_out(out, force=force, reads={"FILE": stored.file})
    from sipp.cli.bench_network import bench_file
    from sipp.results.bench import KIND
    from sipp.results.jsonio import to_json

    measured = bench_file(stored, n_points=batch, n_threads=threads, repeats=repeats)
    record = {"kind": KIND, "sipp": sipp.__version__, **to_json(measured)}
    return Answer([str(measured), *write_record(out, record, force=force)], record)
