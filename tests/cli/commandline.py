"""The command line in this process: words in; exit code, stdout and stderr out."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sipp.cli.errors import run_and_report
from sipp.cli.main import app


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*words: object) -> Done:
    """What the command line does with these words, as `sipp.cli.main.main` does it."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = run_and_report(app, [*map(str, words)])
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def told(*words: object) -> Any:
    """The JSON document of a command that must succeed."""
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


def refused(done: Done, place: str, *words: str) -> str:
    """Exit code 2, nothing on stdout, and three lines about this place with these words; what to do."""
    assert done.returncode == 2 and done.stdout == "", done.stderr
    what, where, fix = three_lines(done.stderr)
    assert where.startswith(place) and all(word in what for word in words), done.stderr
    return fix


def must_not_be_called(*args: object, **options: object) -> None:
    raise AssertionError("work was begun")
