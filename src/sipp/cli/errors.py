"""Error reporting of commands: three lines (what, where, what to do) and an exit code; tracebacks with --debug."""

from __future__ import annotations

import errno
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from sipp.errors import SippError
from sipp.results import PruneOptions, other_names

UNEXPECTED = 1
WRONG_INPUT = 2
NOT_CERTIFIED = 3
INTERRUPTED = 130  # 128 + SIGINT
TERMINATED = 143  # 128 + SIGTERM
EXIT_CODES = (
    "Exit codes: 0 done; 1 a bug (--debug shows the traceback); 2 wrong input; 3 not certified, nothing written; "
    "130 stopped by Ctrl-C, 143 by SIGTERM."
)
DEBUG = "--debug"
POSITIONAL = {"eval": "--pruned", "certify": "--pruned", "prune": "--model"}  # what a bare word after a command means
MOST_CHARACTERS = 700  # per line: a thousand parameter names would help nobody
NO_BUGS = (  # of the disk, or impossible file names
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM,
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR,
)  # fmt: skip

# typer keeps its own copy of click in newer versions; both offer BadParameter, a UsageError
_USAGE: type[Exception] = typer.BadParameter.__bases__[0]
# Python arguments, and their options: "keep=0.5" in a message becomes "--keep 0.5".
OPTIONS = {name: name.replace("_", "-") for name in (*(field.name for field in fields(PruneOptions)), "length")}
OPTIONS |= {name: name.replace("_", "-") for name in ("epsilon", "max_accuracy_drop", "share")} | {"output": "part"}


class CommandError(SippError):
    """An error that ends a command; `where` is the option or the command."""

    def __init__(self, what: str, *, where: str = "", fix: str = "", code: int = WRONG_INPUT) -> None:
        super().__init__(what, where=where, fix=fix)
        self.code = code


class Terminated(SystemExit):
    """Raised on SIGTERM, so that every `finally` runs."""


@contextmanager
def naming_option(where: str, fix: str) -> Iterator[None]:
    """Reports errors raised in the block at this option; `fix` is used if they have none."""
    try:
        yield
    except CommandError:
        raise
    except SippError as error:
        raise as_command_error(error, where, fix) from error


def as_command_error(error: SippError, where: str, fix: str) -> CommandError:
    """The error, reported at the option `where`, with options in place of Python arguments."""
    fault, advice = error.fault, error.fix
    if error.option in OPTIONS:
        fault, advice = (
            text.replace(f"{error.option}=", f"--{OPTIONS[error.option]} ").rstrip() for text in (fault, advice)
        )
    return CommandError(fault, where=where, fix=advice or fix)


def run_and_report(app: Callable[..., Any], words: list[str]) -> int:
    """Runs the command line with these arguments, reports errors on stderr, and returns the exit code."""
    plain = words[: words.index("--")] if "--" in words else words
    debug = DEBUG in plain
    kept = [word for word in plain if word != DEBUG] + words[len(plain) :]
    command = f"sipp {kept[0]}" if kept and not kept[0].startswith("-") else "sipp"
    with _plain_warnings():
        try:
            code = app(args=kept, prog_name="sipp", standalone_mode=False)
        except Terminated:
            typer.echo("stopped by SIGTERM", err=True)
            return TERMINATED
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # `sipp` without arguments shows the help
                if text := getattr(error, "message", ""):  # empty if rich has printed it already
                    typer.echo(text)
                return WRONG_INPUT
            if debug:
                traceback.print_exception(error, file=sys.stderr)
            reported = _reported(error, command, kept, debug)
            typer.echo(three_lines(reported.what, reported.where, reported.fix), err=True)
            return reported.code
    if code == INTERRUPTED:
        typer.echo("stopped by Ctrl-C", err=True)
    return code if isinstance(code, int) else 0


def three_lines(what: str, where: str, fix: str) -> str:
    """The error message: what was wrong, where, and what to do, one line each."""
    return f"error: {_one_line(what)}\nwhere: {_one_line(where)}\ndo:    {_one_line(fix)}"


def _reported(error: Exception, command: str, kept: list[str], debug: bool) -> CommandError:
    """The text of an error."""
    if isinstance(error, CommandError):
        return error
    if isinstance(error, SippError):
        return as_command_error(error, command, f"see {command} --help")
    if isinstance(error, _USAGE):
        known = getattr(error, "ctx", None)  # None, or that of the group if the command does not exist
        place = getattr(known, "command_path", command)
        unknown = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
        fix = "give --keep, the share of weights to keep" if unknown in other_names.SHARES else f"see {place} --help"
        if kept[1:] and not kept[1].startswith("-") and (option := POSITIONAL.get(kept[0])) is not None:
            fix = f"write {option} {kept[1]}"
        return CommandError(error.format_message(), where=place, fix=fix)  # type: ignore[attr-defined]
    if isinstance(error, MemoryError):
        return CommandError("out of memory", where=command, fix="give fewer --points")
    if isinstance(error, OSError) and error.errno in NO_BUGS:
        place = str(error.filename) if error.filename else f"{command}, its output"
        fix = "free space, allow reading and writing, or give another place"
        return CommandError(error.strerror or str(error), where=place, fix=fix)
    # a bug: its type, the last line of this package that ran, and how to see more
    home = Path(__file__).parent.parent
    frames = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    ours = [f"{file.relative_to(home)}:{line}" for file, line in frames if file.is_relative_to(home)]
    fix = "report it with the traceback above" if debug else f"run the same command with {DEBUG} for the traceback"
    place = ours[-1] if ours else "outside of sipp"
    return CommandError(f"unexpected {type(error).__name__}: {error}", where=place, fix=fix, code=UNEXPECTED)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 4] + " ..."


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Prints each distinct warning as one line on stderr."""
    seen: set[str] = set()

    def show(message: Warning | str, *args: object) -> None:
        text = _one_line(str(message))
        if text not in seen:
            seen.add(text)
            typer.echo(f"warning: {text}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        warnings.simplefilter("always", UserWarning)
        yield
