"""Runs code in a new process with torch and Numba already imported, which takes longer than most such programs.

One process imports them, and nothing else, and is forked for each of them (`forkserver` of multiprocessing).
"""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "numba"])


def run_python(code: str, *arguments: object, **environment: str) -> "CompletedProcess[str]":
    """What `python -c code arguments` prints and ends with. torch has as many threads as where it was imported."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        words = [str(argument) for argument in arguments]
        process = _SERVER.Process(target=_run, args=(code, words, {**os.environ, **environment}, outputs))
        process.start()
        process.join()
        assert process.exitcode is not None
        stdout, stderr = (path.read_text() if path.exists() else "" for path in outputs)
    return CompletedProcess([code, *words], process.exitcode, stdout, stderr)


def run_script(script: Path, *arguments: object, **environment: str) -> "CompletedProcess[str]":
    """What `python script arguments` prints and ends with."""
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    return run_python(f"import sys; sys.path.insert(0, {str(script.parent)!r}); {code}", *arguments, **environment)


def _run(code: str, arguments: list[str], environment: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, path in zip((1, 2), outputs):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules["numba"].core.config.reload_config()  # what the environment says, as an import would read it
    sys.argv[:] = ["-c", *arguments]
    exec(compile(code, "<a fresh process>", "exec"), {"__name__": "__main__"})
