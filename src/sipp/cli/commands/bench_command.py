"""`sipp bench`: times a stored network in the sparse runtime and in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import sipp
from sipp.cli.options import Force, StoredOptions
from sipp.cli.output import Answer
from sipp.results import Option

N_POINTS, MOST_POINTS = 64, 4096


def bench(
    *,
    stored: StoredOptions,
    out: Annotated[
        Path | None, Option("File for the record; in the network's folder, it appears on the page.", "Output")
    ] = None,
    force: Force = False,
    batch_size: Annotated[
        int, Option("Inputs per call; a single input is timed too.", "Machine", least=1, most=MOST_POINTS)
    ] = N_POINTS,
) -> Answer:
    """Time a pruned network in the sparse runtime and in PyTorch, step by step and as a whole.

    For example: sipp bench sparse --model my.py:net --data new.npz --out sparse/bench.json
    """
    from sipp.cli.data_option import normalisation_lines
    from sipp.cli.errors import naming_option
    from sipp.cli.out_option import check_out, write_record
    from sipp.cli.stored_option import example_for, stored_network
    from sipp.results import BENCH_KIND, SavedFile, to_json

    check_out(out, force=force, reads={"FILE": stored.file, "--data": stored.data})
    network = stored_network(stored)
    example, points = example_for(network, stored, batch_size)
    with naming_option(f"FILE {stored.file}", "see sipp bench --help"):
        measured = sipp.bench(network.model, example)
    if isinstance(network.contents, SavedFile):  # this very file, which may hold rounded values and a certificate
        file = network.contents
        measured = replace(measured, bytes=replace(measured.bytes, file=file.n_bytes, bound=file.bound_bytes))
    record = {"kind": BENCH_KIND, "sipp": sipp.__version__, **to_json(measured)}
    return Answer([*normalisation_lines(points), str(measured), *write_record(out, record)], record)
