"""`sipp bench`: times a stored network in the sparse runtime and in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import sipp
from sipp.cli.errors import naming_option
from sipp.cli.options import Stored, to_record
from sipp.cli.output import Answer, check_out, record_of, write_record
from sipp.results import Option

N_INPUTS, MOST_INPUTS = 64, 4096


def bench(
    *,
    stored: Stored,
    out: Annotated[Path | None, to_record] = None,
    force: bool = False,
    batch_size: Annotated[
        int, Option("Inputs per call. A single input is timed too.", "Machine", least=1, most=MOST_INPUTS)
    ] = N_INPUTS,
) -> Answer:
    """Time a pruned network in the sparse runtime and in PyTorch.

    For example: sipp bench sparse --model my.py:net --data new.npz --out sparse/bench.json
    """
    from sipp.cli.inputs import input_lines
    from sipp.cli.stored import inputs_for, stored_network
    from sipp.results import PrunedTo, SavedFile

    check_out(out, force=force, reads={"FILE": stored.file, "--data": stored.data})
    network = stored_network(stored)
    drawn = inputs_for(network, stored, batch_size)
    with naming_option(f"FILE {stored.file}", "see sipp bench --help"):
        whole = PrunedTo(network.model, network.pruned, network.certificate, (), "")  # the certificate counts as well
        measured = sipp.bench(whole, drawn.example)
    file = network.record
    if isinstance(file, SavedFile):  # this very file, which may hold rounded values and a certificate
        measured = replace(measured, file_bytes=file.n_bytes, bound_bytes=file.bound_bytes)
    record = record_of(type(measured).__name__, measured)
    return Answer([*input_lines(drawn), str(measured), *write_record(out, record)], record)
