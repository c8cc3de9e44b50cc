"""The command line in this process: words in; exit code, stdout and stderr out."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from sipp.cli import main


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(*words: object) -> Done:
    """What the command line does with these words."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", ["sipp", *map(str, words)]):
        try:
            main()
        except SystemExit as stop:
            return Done(int(stop.code or 0), out.getvalue(), err.getvalue())
    return Done(0, out.getvalue(), err.getvalue())


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
