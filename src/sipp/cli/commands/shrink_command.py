"""`sipp shrink`: makes a smaller dense network of a stored one."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import Stored, out_short
from sipp.cli.output import Answer, check_out, record_of, write_out
from sipp.errors import ModelError
from sipp.results import Option, words

PT, ONNX = ".pt", ".onnx"

N_CALIBRATION, BATCH_SIZE = 1000, 50  # calibration inputs, for a budget
N_INPUTS = 2  # in the example: torch.export would specialise to a batch of 1


def shrink(
    *,
    stored: Stored,
    out: Annotated[Path, out_short("NAME.pt (the module, by torch.save), or NAME.onnx.")],
    multiply_adds: Annotated[float | None, Option("Share of the multiply-adds to keep.", "What to prune")] = None,
    force: bool = False,
) -> Answer:
    """Make a smaller dense network: remove dead channels, or whole channels down to a budget.

    For example: sipp shrink sparse --model my.py:net --data points.npz --out small.onnx
    """
    from sipp.cli.stored import inputs_for, stored_network

    if out.suffix not in (PT, ONNX):
        raise CommandError(
            f"{out.name} ends in none of {PT}, {ONNX}", where=f"--out {out}", fix=f"give NAME{PT} or NAME{ONNX}"
        )
    check_out(out, force=force, reads={"FILE": stored.file, "--data": stored.data})
    network = stored_network(stored)
    example = inputs_for(network, stored, N_INPUTS).example
    data = example
    if multiply_adds is not None:
        data = inputs_for(network, stored, N_CALIBRATION, BATCH_SIZE).batches
    with naming_option(f"FILE {stored.file}", "see sipp shrink --help"):
        small = sipp.shrink(network.model, data, multiply_adds=multiply_adds)
        certificate = network.certificate
        is_same = small.chosen is None  # with a budget, outputs change, and no certificate holds for them
        if is_same and certificate is not None and certificate.pruned_hash == small.hash_before:
            small = replace(small, certificate=certificate)
        if out.suffix == PT:
            write_out(out, _module_bytes(small.model))
        else:
            sipp.export(small, out, example)
    step = (
        ""
        if out.suffix == ONNX
        else f"in Python, torch.load('{out}', weights_only=False) for sipp.evaluate, sipp.certify"
    )
    if small.n_parameters == small.n_parameters_before:
        step = "no dead channels; --multiply-adds 0.5 removes others"
    lines = [str(small), words.labelled_line("written", f"{out} ({words.of_bytes(out.stat().st_size)})")]
    lines += [words.labelled_line("next", step)] if step else []
    return Answer(lines, record_of("shrink", small, {"network": network.name}) | {"path": str(out)})


def _module_bytes(model: Any) -> bytes:
    import torch

    content = io.BytesIO()
    try:
        torch.save(model, content)
    except Exception as error:  # user classes may raise anything
        raise ModelError(
            f"torch.save cannot write its {type(model).__name__} ({type(error).__name__}: {error})",
            fix="give a name that ends in .onnx",
        ) from error
    return content.getvalue()
