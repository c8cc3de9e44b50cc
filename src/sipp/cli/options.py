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
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

import sipp
from sipp.cli.errors import as_command_error
from sipp.cli.output import Answer, print_answer
from sipp.errors import OptionError, SippError
from sipp.files import FILE_SUFFIX
from sipp.results import SHARE, Option, PruneOptions, check

Device = Literal["auto", "cpu", "cuda"]

KINDS = (
    "a data set (digits, cifar10 or cifar10:DIR), a file (.npy, .npz, .safetensors, .pt; for hf:DIR .txt and "
    ".jsonl), or a folder of images or of text"
)
DEFAULT_ROOT = Path("data")  # folder of the data sets
MOST_SIDE = 4096  # pixels; more is probably a typo

_data = partial(Option, group="Model and data")
_goal = partial(Option, group="What to prune")
_guarantee = partial(Option, group="Guarantee")
_machine = partial(Option, group="Machine")
out = partial(Option, group="Output")  # every command says what it writes
to_record = out("File for the record; in the network's folder, it appears on the page.")
out_short = partial(out, names=("--out", "-o"))


def _index_or_name(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


WORDS = {
    "model": _data("A built-in network (resnet20, ...), your own as my.py:function, or hf:DIR."),
    "weights": _data(".safetensors, .pt or a folder from `sipp prune`; default: freshly initialised."),
    "dense": _data("Weights of the dense network: .safetensors or .pt; default: those of hf:DIR."),
    "pruned": _data("Weights of the pruned network, or its folder from `sipp prune`."),
    "data": _data(f"Calibration inputs: {KINDS}."),
    "points": _data(
        "How many calibration inputs. Default: all of a file, as many as the theory asks for of a data set, 128 "
        "sequences of a text.",
        least=1,
    ),
    "normalise": _data("How to normalise images: imagenet (the default), cifar10, none, or MEAN/STD per channel."),
    "size": _data(
        "Side of images from a folder, in pixels; default: what a built-in network takes, else 224 as for ImageNet.",
        least=1,
        most=MOST_SIDE,
    ),
    "length": _data("Tokens per sequence, for a language model; default: 2048, or the model's limit.", least=2),
    "code": _data("Your own .py file that calls sipp.register_method; may be repeated."),
    "settings": _data("Change one value: train.epochs=10.", names=("--set",), metavar="KEY=VALUE"),
    "epsilon": _goal("Instead of --keep: prune as far as this relative error can be certified."),
    "max_accuracy_drop": _goal("Instead of --keep: prune as far as this accuracy drop can be certified."),
    "share": _guarantee(f"Share of inputs that may be further off than the certificate says. Default: {SHARE}."),
    "part": _guarantee(
        "Which part of the output to compare, if there are several: an index or a name (logits).", parse=_index_or_name
    ),
    "force": out("Replace what exists there; files that the command reads are never replaced."),
    "dry_run": out("Say what would be trained, and for how many hours; train nothing."),
    "as_json": out("Print one JSON document to stdout, and everything else to stderr.", names=("--json",)),
    "device": _machine("Where to compute."),
    "batchnorm": _machine(
        "Statistics of BatchNorm while scoring: its own (running), or those of each batch. Default: batch for an "
        "untrained network, which has none of its own."
    ),
    "on_disk": _machine(
        "For hf:DIR larger than memory: prune it block by block, from files to files; run it again to resume. wanda "
        "takes the place of sipp-blend."
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
        _data("The network, as for `sipp prune`; default: the built-in one or hf:DIR that the folder names."),
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
        asked = {name: _asked(name, hint, typed) for name, hint in hints.items()}
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


def _fields(record: Any) -> list[tuple[Any, Any]]:
    """The fields of a record that are typed, with their hints; those of PruneOptions that have a group in --help."""
    hints = get_type_hints(record, include_extras=True)
    known = [(field, hints[field.name]) for field in fields(record)]
    if record is not PruneOptions:
        return known
    return [(field, hint) for field, hint in known if getattr(_annotation(hint), "group", None) is not None]


def _annotation(hint: Any) -> Any:
    return hint.__metadata__[0] if get_origin(hint) is Annotated else None


def option_of(name: str, hint: Any) -> Any:
    """The words of an option: where it stands, else those that it has everywhere."""
    words = _annotation(hint) or WORDS.get(name)
    return words or _annotation(get_type_hints(PruneOptions, include_extras=True)[name])


def _parameters(name: str, hint: Any, default: Any) -> Iterator[inspect.Parameter]:
    """The command parameters for a parameter or field: itself, or one for each field of its record."""
    if is_dataclass(hint):
        for field, inner in _fields(hint):
            yield from _parameters(
                field.name, inner, inspect.Parameter.empty if field.default is MISSING else field.default
            )
        return
    kind, declared = get_args(hint)[0] if _annotation(hint) else hint, option_of(name, hint)
    if isinstance(declared, Option):
        names = declared.names
        if isinstance(default, bool):  # a flag; one that is on by default becomes --no-NAME
            name = option_name(name, default)
            names, default, kind = names or (f"--{name.replace('_', '-')}",), False, bool
        kind = list[str] | None if declared.repeated else str | None if declared.parse is not None else kind
        declared = typer.Option(
            *(names or (...,)), help=declared.words.replace("{methods}", ", ".join(sipp.methods())),
            rich_help_panel=declared.group, min=declared.least, max=declared.most, metavar=declared.metavar,
        )  # fmt: skip
    yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared])


def option_name(name: str, default: Any) -> str:
    return f"no_{name}" if default is True else name


def _asked(name: str, hint: Any, typed: dict[str, Any]) -> Any:
    """The typed value, or the record of the typed values; the errors of a record are reported at its option."""
    if not is_dataclass(hint):
        parse = getattr(option_of(name, hint), "parse", None)
        return typed[name] if parse is None else parse(typed[name])
    values = {}
    try:
        for field, inner in _fields(hint):
            key = option_name(field.name, field.default)
            value = _asked(key if key in typed else field.name, inner, typed)
            values[field.name] = value if key == field.name else not value
        return hint(**values)  # type: ignore[operator]
    except SippError as error:
        if error.option not in typed:
            raise
        where = f"--{error.option.replace('_', '-')} {typed[error.option]}"
        raise as_command_error(error, where, "see --help") from error


def typed_values(record: Any) -> dict[str, Any]:
    """Every option that a record holds, and its value."""
    values: dict[str, Any] = {}
    for field, hint in _fields(type(record)):
        value = getattr(record, field.name)
        values |= typed_values(value) if is_dataclass(hint) else {field.name: value}
    return values


# --- what is checked before any work ----------------------------------------------------------------------------------


def check_method(name: str, where: str) -> None:
    """Refuses a method that nobody knows."""
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
