"""The options of all commands, and how a function becomes a command.

A command is a function whose parameters are its options: their types and defaults stand there, their groups and words
in `WORDS`, because an option means the same in every command. One that does not is annotated where it stands. A
parameter whose type is a record (`PruneOptions`, or a command's own) stands for one option a field.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

import sipp
from sipp.cli.errors import as_command_error
from sipp.cli.output import Answer, print_answer
from sipp.errors import SippError
from sipp.files import FILE_SUFFIX
from sipp.results import Option, PruneOptions

Device = Literal["auto", "cpu", "cuda"]

KINDS = (
    "a data set (digits, cifar10 or cifar10:DIR), a file (.npy, .npz, .pt; for hf:DIR .txt and .jsonl), or a folder "
    "of images or of text"
)
DEFAULT_ROOT = Path("data")  # folder of the data sets
MOST_SIDE = 4096  # pixels; more is probably a typo

_data = partial(Option, group="Model and data")
_goal = partial(Option, group="What to prune")
_guarantee = partial(Option, group="Guarantee")
_machine = partial(Option, group="Machine")
out = partial(Option, group="Output")  # every command says what it writes
to_record = out("File for the result; sipp report shows it if it is in the network's folder.")
out_short = partial(out, names=("--out", "-o"))


def _index_or_name(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


OF_PRUNING = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(PruneOptions, include_extras=True).items()
    if get_origin(hint) is Annotated and hint.__metadata__[0].group is not None
}
WORDS = OF_PRUNING | {
    "model": _data("A built-in network (resnet20, ...), your own as my.py:function, or hf:DIR."),
    "weights": _data(
        "Trained weights: .safetensors, .pt or a folder from `sipp prune`. Without them, the network is untrained."
    ),
    "dense": _data("Weights of the dense network: .safetensors or .pt. Default: those of hf:DIR."),
    "pruned": _data("Weights of the pruned network, or its folder from `sipp prune`."),
    "data": _data(f"Calibration inputs: {KINDS}."),
    "points": _data(
        "How many calibration inputs to use. Default: a whole file, 128 sequences of a text, or as many of a data set "
        "as the theory asks for.",
        least=1,
    ),
    "normalise": _data("How to normalise images: imagenet (the default), cifar10, none, or MEAN/STD per channel."),
    "size": _data(
        "Side of images from a folder, in pixels. Default: what a built-in network takes, else 224 as for ImageNet.",
        least=1,
        most=MOST_SIDE,
    ),
    "length": _data("Tokens per sequence, for a language model. Default: 2048, or the model's limit.", least=2),
    "code": _data("Your own .py file that calls sipp.register_method; may be repeated."),
    "settings": _data("Change one value: train.epochs=10.", names=("--set",), metavar="KEY=VALUE"),
    "epsilon": _goal("Instead of --keep: prune as far as this relative error can be certified."),
    "max_accuracy_drop": _goal("Instead of --keep: prune as far as this accuracy drop can be certified."),
    "share": _guarantee("Share of inputs that may be beyond epsilon."),
    "part": _guarantee(
        "Which part of the output to compare, if there are several: an index or a name (logits).", parse=_index_or_name
    ),
    "force": out("Replace what exists there, never files that the command reads."),
    "dry_run": out("Show how much training is left, and how long it may take. Train nothing."),
    "as_json": out("Print one JSON document to stdout, and everything else to stderr.", names=("--json",)),
    "device": _machine("Where to compute."),
    "batchnorm": _machine(
        "Statistics of BatchNorm while scoring: its own (running), or those of each batch. Default: batch for an "
        "untrained network, which has no statistics yet."
    ),
    "on_disk": _machine(
        "For hf:DIR larger than memory: prune it block by block, from files to files; run it again to resume. The "
        "default method is wanda."
    ),
    "values": out(
        f"Values in name{FILE_SUFFIX}: fp32 or lossless (exact), or rounded to fp16, bf16 or int8. The certificate is "
        "about what is stored.",
        metavar="FORMAT",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How inputs are read: options of every command that runs a network."""

    normalise: str | None = None
    size: int | None = None
    length: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A stored network, and the inputs it is run on: options of the commands that use one."""

    file: Annotated[Path, typer.Argument(help="A file from sipp.save, or a folder from `sipp prune`.")]
    model: Annotated[
        str | None,
        _data("The network, as for `sipp prune`. Default: the built-in one or hf:DIR that the folder names."),
    ] = None
    data: Annotated[str | None, _data(f"Inputs to run it on: {KINDS}.")] = None
    reading: Reading


# --- a function as a command ------------------------------------------------------------------------------------------


def as_command(work: Callable[..., Answer | None]) -> Callable[..., None]:
    """Turns a function into a command that prints its answer: adds --json, makes an option of each field of a record,
    and sorts options by group. With --json, anything the function prints goes to stderr.
    """
    hints = get_type_hints(work, include_extras=True)
    del hints["return"]
    parameters = [*_parameters("as_json", bool, False)]
    for declared in inspect.signature(work).parameters.values():
        parameters += _parameters(declared.name, hints[declared.name], declared.default)
    parameters.sort(key=lambda one: (_panel_index(one), one.name == "as_json"))

    @wraps(work)
    def command(*, as_json: bool, **typed: Any) -> None:  # the signature is set below
        asked = {name: _record(hint, typed) if is_dataclass(hint) else typed[name] for name, hint in hints.items()}
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            answer = work(**asked)
        if answer is not None:
            print_answer(answer, as_json=as_json)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _panel_index(parameter: inspect.Parameter) -> int:
    """The position of a parameter in --help; arguments come first."""
    panel = getattr(get_args(parameter.annotation)[1], "rich_help_panel", None)
    return -1 if panel is None else Option.GROUPS.index(panel)


def _fields(record: Any) -> dict[str, tuple[Any, Any]]:
    """{name: (hint, default)} of the fields of a record that are typed; of PruneOptions, those with words."""
    hints = get_type_hints(record, include_extras=True)
    found = {field.name: (hints[field.name], field.default) for field in fields(record)}
    return {name: one for name, one in found.items() if record is not PruneOptions or name in OF_PRUNING}


def _parameters(name: str, hint: Any, default: Any) -> Iterator[inspect.Parameter]:
    """The command parameters for a parameter or field: itself, or one for each field of its record."""
    if is_dataclass(hint):
        for inner, (inner_hint, inner_default) in _fields(hint).items():
            yield from _parameters(inner, inner_hint, Parameter.empty if inner_default is MISSING else inner_default)
        return
    kind, declared = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, WORDS[name])
    if isinstance(declared, Option):
        names = declared.names
        if isinstance(default, bool):  # a flag, without a second one that takes it back
            names = names or (f" /--no-{name}" if default else f"--{name.replace('_', '-')}",)
        kind = list[str] | None if declared.repeated else str | None if declared.parse is not None else kind
        metavar = declared.metavar or ("TEXT" if declared.parse is not None else None)
        declared = typer.Option(
            *(names or (...,)), help=declared.words.replace("{methods}", ", ".join(sipp.methods())),
            rich_help_panel=declared.group, show_default=default is not True, min=declared.least, max=declared.most,
            metavar=metavar, parser=declared.parse,
        )  # fmt: skip
    yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared])


def _record(kind: Any, typed: dict[str, Any]) -> Any:
    """The record of the typed values; its errors are reported at their option."""
    hints = {name: hint for name, (hint, _) in _fields(kind).items()}
    try:
        return kind(
            **{name: _record(hint, typed) if is_dataclass(hint) else typed[name] for name, hint in hints.items()}
        )
    except SippError as error:
        if error.option not in typed:
            raise
        where = f"--{error.option.replace('_', '-')} {typed[error.option]}"
        raise as_command_error(error, where, "see --help") from error


def load_code(paths: list[Path] | None) -> None:
    """Registers the methods in the user's own files."""
    if paths:
        from sipp_lab.own_code import load_scores

        for path in paths:
            load_scores(path)
