"""Whoever only reads records waits for neither torch nor Numba: what is imported, not how long it takes."""

import subprocess
import sys
from pathlib import Path

from fresh_process import run_python
from report.synthetic import big_run

from sipp.experiments.pipelines import pipeline_names

HEAVY = ("torch", "torch._dynamo", "numba", "ray", "accelerate", "matplotlib")
TOLD = f"import sys; print([name for name in {HEAVY} if name in sys.modules])\n"

LIGHT = (
    "sipp.storage.files",
    "sipp.storage.tensors",
    "sipp.storage.state_files",
    "sipp.results.bench",
    "sipp.results.evaluation",
    "sipp.results.schemas",
    "sipp.results.json_values",
    "sipp.storage.outputs",
    "sipp.storage.pruned_folder",
    "sipp.results.certificate",
    "sipp.results.network_hash",
    *(f"sipp.experiments.pipelines.{name.replace('-', '_')}" for name in pipeline_names()),
    "sipp.experiments.arms",
    "sipp.experiments.recipes",
    "sipp.experiments.studies",
    "sipp.experiments.runs.reading",
    "sipp.report",
)


def test_whatever_reads_records(tmp_path: Path) -> None:
    """The modules, a list of runs, their page and the descriptions of recipes, one after the other."""
    big_run(tmp_path / "runs" / "one", methods=("sipp-det", "wt"), n_levels=2, n_seeds=1, n_layers=2)
    tasks = (
        f"import {', '.join(LIGHT)}",
        "from pathlib import Path; from sipp.experiments.runs.reading import list_runs; "
        f"root = Path({str(tmp_path / 'runs')!r}); assert list_runs(root)",
        "from sipp.report import read_results, render; assert render(read_results([root]))",
        "from sipp.experiments.recipes import recipe_descriptions; assert len(recipe_descriptions()) > 10",
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
