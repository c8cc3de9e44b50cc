"""Whoever asks for help waits for neither torch nor Numba: what is imported, not how long it takes."""

import subprocess
import sys

from fresh_process import run_python

HEAVY = ("torch", "torch._dynamo", "numba", "ray", "accelerate", "matplotlib")
TOLD = f"import sys; print([name for name in {HEAVY} if name in sys.modules])\n"

LIGHT = (
    "sipp.files",
    "sipp.results.bench",
    "sipp.results.evaluation",
    "sipp.results.jsonio",
    "sipp.results.sheet",
    "sipp.results.certificate",
)


def test_help_and_lists_load_no_torch() -> None:
    """The modules, the options of every command and the descriptions of recipes, one after the other."""
    tasks = (
        f"import {', '.join(LIGHT)}",
        "from sipp.cli.main import app; assert app.commands",
    )
    code = "".join(f"{task}\n{TOLD}" for task in tasks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert dict(zip(tasks, done.stdout.splitlines(), strict=True)) == dict.fromkeys(tasks, "[]")


def test_a_pruning_loads_what_it_needs_and_not_the_compiler_of_torch() -> None:
    """Which takes a second to import; and so heavy modules are noticed. A public name is loaded when asked for."""
    code = (
        "from sipp import prune; assert prune.__name__ == 'prune'; import sys; torch = sys.modules['torch']; "
        "prune(torch.nn.Linear(4, 3), torch.rand(8, 4), keep=0.5, method='sipp-det')\n"
    )
    done = run_python(code + TOLD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['torch', 'numba']"
