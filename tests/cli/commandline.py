"""The command line in this process: words in; exit code, stdout and stderr out."""

import functools
import io
import json
import struct
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.main import get_command
from typer.models import ArgumentInfo, OptionInfo

from sipp.cli import main
from sipp.cli.errors import run_and_report
from sipp.cli.main import COMMANDS, app, function_of

BUILT = get_command(app)  # once, and so is each command: thousands are called
main.command_of = functools.cache(main.command_of)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*words: object) -> Done:
    """What the command line does with these words, as `sipp.cli.main.main` does it, with the commands built once."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = run_and_report(BUILT, [*map(str, words)])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, hidden and temporary ones too; folders that are empty as well."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def three_lines(stderr: str) -> tuple[str, str, str]:
    """What was wrong, where, and what to do, after the warnings if there are any."""
    lines = [line for line in stderr.splitlines() if not line.startswith("warning: ")]
    assert [line.split(":")[0] for line in lines] == ["error", "where", "do"], stderr
    what, where, fix = (line.partition(":")[2].strip() for line in lines)
    assert what and where and fix, stderr
    return what, where, fix


def refused(done: Done, place: str, *words: str) -> None:
    """Exit code 2, nothing on stdout, and three lines about this place with these words."""
    assert done.returncode == 2 and done.stdout == "", done.stderr
    what, where, _ = three_lines(done.stderr)
    assert where.startswith(place) and all(word in what for word in words), done.stderr


def must_not_be_called(*args: object, **options: object) -> None:
    raise AssertionError("work was begun")


def safetensors_with(header: dict[str, object], body: bytes = b"\0" * 64) -> bytes:
    """A safetensors file with this header, whatever it says."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@dataclass(frozen=True)
class Asked:
    """One option or argument of a command, as its function declares it."""

    command: str
    label: str  # --weights, or RECIPE
    kind: type  # of one value: str, int, float, bool or Path; str where there are choices
    choices: tuple[str, ...]

    @property
    def is_argument(self) -> bool:
        return not self.label.startswith("-")


def asked() -> list[Asked]:
    """Every option and argument of every command, from the list of commands itself: a new one is found here."""
    found = []
    for name in COMMANDS:
        for parameter, hint in get_type_hints(function_of(name), include_extras=True).items():
            if get_origin(hint) is not Annotated:
                continue
            info = next(one for one in get_args(hint)[1:] if isinstance(one, OptionInfo | ArgumentInfo))
            long = [one for one in info.param_decls or () if isinstance(one, str) and one.startswith("--")]
            label = (
                parameter.upper() if isinstance(info, ArgumentInfo) else (*long, f"--{parameter}".replace("_", "-"))[0]
            )
            kind = _without_none(get_args(hint)[0])
            kind = get_args(kind)[0] if get_origin(kind) is list else kind
            choices = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
            found.append(Asked(name, label, str if choices else kind, choices))
    return found


def _without_none(hint: Any) -> Any:
    parts = [part for part in get_args(hint) if part is not type(None)]
    return parts[0] if get_origin(hint) in (Union, UnionType) and len(parts) == 1 else hint
