"""The command `sipp bench`: the kernels of this machine against torch's matmul, scoring against a forward pass."""

from __future__ import annotations

from typing import Annotated

import typer

import sipp
from sipp.cli.options import Device, Weights
from sipp.cli.output import Json, only_json, plain_table, print_json, show

REPEATS, MOST_REPEATS = 5, 1000


def bench(
    model: Annotated[
        str, typer.Option(help="The network to score: built-in, or package.module:callable.")
    ] = "resnet20",
    weights: Weights = None,
    data: Annotated[str | None, typer.Option(help="Points; default: noise of a built-in network's shape.")] = None,
    repeats: Annotated[
        int, typer.Option(help="Times each is measured; the best counts.", min=1, max=MOST_REPEATS)
    ] = REPEATS,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time the kernels and the scoring of a network on this machine, after checking that they are right."""
    from sipp.cli.benching import measure

    with only_json(as_json):
        machine, lines = measure(model, weights, data, device, repeats)
        if not as_json:
            table = plain_table("what", "size", "torch ms", "sipp ms", "ratio", "off by")
            for line in lines:
                times = (f"{line[key]:.2f}" for key in ("torch_ms", "sipp_ms"))
                table.add_row(line["what"], line["size"], *times, f"{line['ratio']:.2f}", f"{line['off_by']:.0e}")
            show(f"{machine}; best of {repeats}, measured in turns", table)
            show("kernel: max-times product over matmul of the same shape; network: scoring over one forward pass")
    if as_json:
        print_json({"kind": "bench", "sipp": sipp.__version__, "machine": machine, "lines": lines})
