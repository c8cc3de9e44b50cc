"""Where runs are kept, and how their networks are trained: the options of `sipp run` and `sipp study`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from sipp.errors import OptionError
from sipp.results import Option

Device = Literal["auto", "cpu", "cuda"]

_output = partial(Option, group="Output")
_machine = partial(Option, group="Machine")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The fields are options of the command line, with their help."""

    data: Annotated[Path, Option("Folder with cifar-10-batches-bin/, mnist/ or imagenet/.", group="Model and data")] = (
        Path("data")
    )
    code: list[Path] | None = None
    out: Annotated[Path, _output("Folder with one folder per run; other files in it are left alone.")] = Path("runs")
    accept_changes: Annotated[bool, _output("Resume even though data, code or device changed.")] = False
    device: Device = "auto"
    engine: Annotated[
        Literal["process", "ray"],
        _machine(
            "Train one network after another in this process, or several at once on Ray; the records are the same."
        ),
    ] = "process"
    at_once: Annotated[
        int | None,
        _machine("Ray: how many networks at once. Default: one for each GPU, or for each n_threads CPUs.", least=1),
    ] = None
    ray_address: Annotated[
        str | None,
        _machine("Ray: a running cluster (auto, HOST:PORT); --out and --data must be on a disk all machines share."),
    ] = None

    def __post_init__(self) -> None:
        if self.engine != "ray" and (self.ray_address or self.at_once):
            raise OptionError("--ray-address and --at-once are for Ray", fix="add --engine ray")
