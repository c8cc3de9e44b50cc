"""Options that several commands share, and how a function becomes a command.

If a parameter's type is a dataclass (`PruneOptions`, or a command's own), each of its fields becomes an option. So
options are declared once, and the function receives the dataclass.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

import sipp
from sipp.cli.errors import as_command_error
from sipp.cli.output import Answer, print_answer
from sipp.errors import OptionError, SippError
from sipp.results import Group, NormStats, Option, PruneOptions, check

KINDS = (
    "a data set (digits, cifar10 or cifar10:DIR), a file (.npy, .npz, .safetensors, .pt; for hf:DIR .txt and "
    ".jsonl), a folder of images or of text, "
    "or noise (random:16x3x32x32)"
)
REAL_KINDS = KINDS.rpartition(", or")[0]  # those that a certificate can use
DEFAULT_ROOT = Path("data")  # folder of the data sets
DEFAULT_RUNS = Path("runs")
MOST_SIDE = 4096  # pixels; more is probably a typo

_data = partial(Option, group="Model and data")


def as_command(work: Callable[..., Answer | None]) -> Callable[..., None]:
    """Turns a function into a command that prints its answer: adds --json, makes an option of each dataclass field, and
    sorts options by group. With --json, anything the function prints goes to stderr.
    """
    hints = get_type_hints(work, include_extras=True)
    del hints["return"]
    own_parameters = inspect.signature(work).parameters.values()
    parameters = [
        parameter
        for declared in own_parameters
        for parameter in _parameters(declared.name, hints[declared.name], declared.default)
    ]
    parameters += _parameters("as_json", Json, False)
    parameters.sort(key=_panel_index)

    @wraps(work)
    def command(*, as_json: bool, **typed: Any) -> None:  # the signature is set below
        asked = {
            name: _build_record(hint, typed) if is_dataclass(hint) else _parsed(hint, typed[name])
            for name, hint in hints.items()
        }
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            answer = work(**asked)
        if answer is not None:
            print_answer(answer, as_json=as_json)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _panel_index(parameter: inspect.Parameter) -> int:
    """The position of a parameter in --help; those without a group come first."""
    panel = getattr((*get_args(parameter.annotation), None, None)[1], "rich_help_panel", None)
    return -1 if panel is None else get_args(Group).index(panel)


def _parameters(name: str, hint: Any, default: Any) -> Iterator[inspect.Parameter]:
    """The command parameters for a parameter or field: itself, or one for each field of its dataclass."""
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            missing = field.default is MISSING
            yield from _parameters(field.name, hints[field.name], inspect.Parameter.empty if missing else field.default)
        return
    kind, declared, *_ = get_args(hint) if get_origin(hint) is Annotated else (hint, Option(""))
    if isinstance(declared, Option):
        if declared.group is None:
            return
        names = declared.names
        if isinstance(default, bool):  # a flag; one that is on by default becomes --no-NAME
            name = option_name(name, default)
            names, default, kind = names or (f"--{name.replace('_', '-')}",), False, bool
        kind = list[str] | None if declared.repeated else str if declared.parse is not None else kind
        declared = typer.Option(
            *(names or (...,)), help=declared.words.replace("{methods}", ", ".join(sipp.methods())),
            rich_help_panel=declared.group, min=declared.least, max=declared.most, metavar=declared.metavar,
        )  # fmt: skip
    yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared])


def names_of(kind: type) -> list[str]:
    """The fields of a record that are options."""
    hints = get_type_hints(kind, include_extras=True)
    return [field.name for field in fields(kind) if any(_parameters(field.name, hints[field.name], field.default))]


def option_name(name: str, default: Any) -> str:
    return f"no_{name}" if default is True else name


def _build_record(kind: Any, typed: dict[str, Any]) -> Any:
    """Builds the dataclass from the typed options; its errors are reported at the option."""
    hints, values = get_type_hints(kind, include_extras=True), {}
    try:
        for field in fields(kind):
            name, hint = option_name(field.name, field.default), hints[field.name]
            if is_dataclass(hint):
                values[field.name] = _build_record(hint, typed)
            elif name in typed:
                value = _parsed(hint, typed[name])
                values[field.name] = value if name == field.name else not value
        return kind(**values)
    except SippError as error:
        if error.option not in typed:
            raise
        where = f"--{error.option.replace('_', '-')} {typed[error.option]}"
        raise as_command_error(error, where, "see --help") from error


def _parsed(hint: Any, value: Any) -> Any:
    """The typed value, converted if its annotation says how."""
    parse = getattr((*get_args(hint), None, None)[1], "parse", None)
    return value if parse is None else parse(value)


def of_prune(name: str) -> Any:
    """The annotation of this option of `sipp prune`, for reuse in another command."""
    return get_type_hints(PruneOptions, include_extras=True)[name].__metadata__[0]


def _index_or_name(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


Model = Annotated[str, _data("A built-in network (resnet20, ...), your own as my.py:function, or hf:DIR.")]
Weights = Annotated[
    Path | None, _data(".safetensors, .pt or a folder from `sipp prune`; default: freshly initialised.")
]
Data = Annotated[str | None, _data(f"Calibration inputs: {KINDS}.")]
NeededData = Annotated[str, _data(f"Calibration inputs: {KINDS}.")]
Dense = Annotated[
    Path | None,
    _data("Weights of the dense network: .safetensors or .pt; default: those of hf:DIR."),
]
PrunedWeights = Annotated[Path, _data("Weights of the pruned network, or its folder from `sipp prune`.")]
Normalise = Annotated[
    str | None,
    _data("How to normalise images: imagenet (the default), cifar10, none, or MEAN/STD per channel."),
]
Size = Annotated[
    int | None,
    _data(
        "Side of images from a folder, in pixels; default: what a built-in network takes, else 224 as for ImageNet.",
        least=1,
        most=MOST_SIDE,
    ),
]
Length = Annotated[
    int | None,
    _data("Tokens per sequence, for a language model; default: 2048, or the model's limit.", least=2),
]
Include = Annotated[list[str] | None, of_prune("include")]
Exclude = Annotated[list[str] | None, of_prune("exclude")]
PointsOption = Annotated[
    str | None,
    _data(
        "How many calibration inputs: a number, all, or theory (as many as the theory asks for). "
        "Default: all of a file, theory for a data set, 128 sequences of a text.",
    ),
]
Share = Annotated[float, Option("Share of inputs that may be further off than the certificate says.", "Guarantee")]
Confidence = Annotated[float, of_prune("confidence")]
CConstant = Annotated[float, of_prune("c_constant")]
KConstant = Annotated[float, of_prune("k_constant")]
Part = Annotated[
    int | str | None,
    Option(
        "Which part of the output to compare, if there are several: an index or a name (logits).",
        "Guarantee",
        parse=_index_or_name,
    ),
]
Seed = Annotated[int, of_prune("seed")]
BatchNorm = Annotated[
    NormStats | None,
    Option(
        "Statistics of BatchNorm while scoring: its own (running), or those of each batch. Default: batch for an "
        "untrained network, which has none of its own.",
        "Machine",
    ),
]
BatchSize = Annotated[int | None, Option("Inputs per forward pass; default: chosen by their size.", "Machine", least=1)]
Device = Annotated[Literal["auto", "cpu", "cuda"], Option("Where to compute.", "Machine")]
Settings = Annotated[
    list[str] | None,
    _data("Change one value: train.epochs=10.", names=("--set",), metavar="KEY=VALUE"),
]
CodeFiles = Annotated[
    list[Path] | None,
    _data("Your own .py file that calls sipp.register_method; may be repeated."),
]
RunsOut = Annotated[Path, Option("Folder that holds one folder per run; other files in it are left alone.", "Output")]
DataRoot = Annotated[Path, _data("Folder with cifar-10-batches-bin/, mnist/ or imagenet/.")]
Force = Annotated[bool, Option("Replace what exists there; files that the command reads are never replaced.", "Output")]
Json = Annotated[
    bool, Option("Print one JSON document to stdout, and everything else to stderr.", "Output", ("--json",))
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where runs are kept, and how their networks are trained: options of `sipp run` and `sipp study`."""

    data: DataRoot = DEFAULT_ROOT
    code: CodeFiles = None
    out: RunsOut = DEFAULT_RUNS
    accept_changes: Annotated[bool, Option("Resume even though data, code or device changed.", "Output")] = False
    device: Device = "auto"
    engine: Annotated[
        Literal["process", "ray"],
        Option(
            "Train one network after another in this process, or several at once on Ray; the records are the same.",
            "Machine",
        ),
    ] = "process"
    at_once: Annotated[
        int | None,
        Option("Ray: how many networks at once; default: as many as the CPUs or GPUs allow.", "Machine", least=1),
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            "Ray: a running cluster (auto, HOST:PORT); --out and --data must be on a disk all machines share.",
            "Machine",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How inputs are read: the options of every command that runs a network."""

    normalise: Normalise = None
    size: Size = None
    length: Length = None


@dataclass(frozen=True, kw_only=True)
class InputOptions(ReadingOptions):
    """The same, for commands that run a network on all of them."""

    batch_size: BatchSize = None


@dataclass(frozen=True, kw_only=True)
class StoredOptions:
    """A stored network, and the inputs it is run on: options of the commands that use one."""

    file: Annotated[Path, typer.Argument(help="A file from sipp.save, or a folder from `sipp prune`.")]
    model: Annotated[
        str | None,
        _data(
            "The network, as for `sipp prune`; default: the built-in one or hf:DIR that the folder names.",
        ),
    ] = None
    data: Annotated[str | None, _data(f"Inputs; default: noise for a built-in network. Otherwise {KINDS}.")] = None
    reading: ReadingOptions


def check_method(name: str, where: str) -> None:
    """Refuses, before any work, a method that nobody knows."""
    known = sipp.methods()
    if name not in known:
        here = check.method_here(name) or (
            f"not a method{check.nearest(name, known)}",
            f"give one of {', '.join(known)}",
        )
        error = OptionError(f"{name!r:.40} is {here[0]}", fix=here[1], option="method")
        raise as_command_error(error, where, "see --help")


def load_code(paths: list[Path] | None) -> None:
    """Registers the methods in the user's own files."""
    if paths:
        from sipp_lab.own_code import load_scores

        for path in paths:
            load_scores(path)
