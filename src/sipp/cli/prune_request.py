"""The options of `sipp prune`: which contradict each other, and which the public functions take."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sipp.cli.options import Device, Reading, out
from sipp.cli.output import check_out
from sipp.errors import OptionError
from sipp.files import FILE_SUFFIX, RECORD_NAME, WEIGHTS_NAME
from sipp.results import SHARE, NormStats, Option, Precision, PruneOptions

EXACT = ("fp32", "lossless")  # values that are not rounded


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of the command: `PruneOptions` and those that only the command line has."""

    model: str
    data: str | None = None
    weights: Path | None = None
    reading: Reading
    code: list[Path] | None = None
    points: int | None = None
    options: PruneOptions
    epsilon: float | None = None
    max_accuracy_drop: float | None = None
    holdout: Annotated[
        str | None,
        Option(
            "Inputs for a certificate, which must be new to the network. The name of a data set means its test part.",
            "Guarantee",
        ),
    ] = None
    share: Annotated[
        float | None, Option(f"Share of inputs that may be beyond epsilon. Default: {SHARE}.", "Guarantee")
    ] = None
    part: int | str | None = None
    out: Annotated[
        Path | None, out(f"New folder for {WEIGHTS_NAME} and {RECORD_NAME}; or one small file, name{FILE_SUFFIX}.")
    ] = None
    dry_run: Annotated[bool, out("Print the layers and the error. Write nothing.")] = False
    values: Precision = "fp32"
    force: bool = False
    device: Device = "auto"
    batchnorm: NormStats | None = None
    on_disk: bool = False

    @property
    def is_one_file(self) -> bool:
        """Whether --out names a file from `sipp.save`, not a folder."""
        return self.out is not None and self.out.suffix == FILE_SUFFIX

    @property
    def has_tolerance(self) -> bool:
        return self.epsilon is not None or self.max_accuracy_drop is not None

    @property
    def goal(self) -> str:
        """The option that sets how far to prune."""
        goals = {
            "--keep": self.options.keep,
            "--pattern": self.options.pattern,
            "--epsilon": self.epsilon,
            "--max-accuracy-drop": self.max_accuracy_drop,
        }
        chosen = [name for name, value in goals.items() if value is not None]
        if len(chosen) != 1:
            raise OptionError(
                "no goal given" if not chosen else f"{' and '.join(chosen)} cannot be combined",
                fix=f"give exactly one of {', '.join(goals)}",
            )
        return chosen[0]

    def arguments(self, verb: Any, because: str, *elsewhere: str) -> dict[str, Any]:
        """The chosen options as arguments of the verb; OptionError for one that neither it nor `elsewhere` takes."""
        given = vars(self.options) | {"epsilon": self.epsilon, "max_accuracy_drop": self.max_accuracy_drop}
        given |= {"share": self.share, "output": self.part}
        chosen = {name: value for name, value in given.items() if value != getattr(PruneOptions, name, None)}
        taken = inspect.signature(verb).parameters
        for name in chosen.keys() - taken - {*elsewhere}:
            option = {"output": "part", "statements": "no-statements"}.get(name, name.replace("_", "-"))
            raise OptionError(f"--{option} has no effect {because}", fix="leave it out")
        return {name: value for name, value in chosen.items() if name in taken}

    def check(self) -> None:
        """Raises, before any work, for options that contradict each other and for an --out that cannot be written."""
        if self.has_tolerance and (self.data is None or self.holdout is None):
            raise OptionError(
                f"{self.goal} is certified on inputs that the pruning has not seen",
                fix="give --data, and new inputs as --holdout; of a data set or a folder with val, the same name",
            )
        if self.out is None and not self.dry_run:
            raise OptionError(
                "no output given", fix="give --out DIR or --out NAME.safetensors, or --dry-run to see the table"
            )
        if self.values != "fp32" and not self.is_one_file:
            raise OptionError(
                f"--values {self.values} is for one small file; a folder contains plain weights",
                fix=f"give --out NAME{FILE_SUFFIX}, or leave it out",
            )
        if self.has_tolerance and self.values not in EXACT:
            raise OptionError(
                f"--values {self.values} does not fit {self.goal}, which certifies the values before rounding",
                fix="give --values lossless; or --keep with --holdout, which certifies what is stored",
            )
        if not self.dry_run:
            reads = {"--weights": self.weights, "--model": self.model if self.model.startswith("hf:") else None}
            check_out(self.out, force=self.force, reads=reads, is_folder=not self.is_one_file)
