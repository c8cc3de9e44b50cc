"""Whoever only reads records waits for neither torch nor Numba: what is imported, not how long it takes."""

import subprocess
import sys
from pathlib import Path

import pytest
from report.synthetic import big_run

from sipp.experiments.pipelines import pipeline_names

HEAVY = ("torch", "torch._dynamo", "numba", "ray", "accelerate", "matplotlib")
TOLD = f"; import sys; print([name for name in {HEAVY} if name in sys.modules])"


def heavy_after(code: str) -> str:
    """Which of the heavy packages a fresh Python has imported after this code."""
    done = subprocess.run([sys.executable, "-c", code + TOLD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LIGHT = (
    "sipp.storage.files",
    "sipp.storage.tensors",
    "sipp.storage.state_files",
    "sipp.records.schemas",
    "sipp.records.json_values",
    "sipp.storage.outputs",
    "sipp.storage.pruned_folder",
    "sipp.records.certificate",
    "sipp.records.hashing",
    *(f"sipp.experiments.pipelines.{name.replace('-', '_')}" for name in pipeline_names()),
    "sipp.experiments.arms",
    "sipp.experiments.recipes",
    "sipp.experiments.studies",
    "sipp.experiments.runs.reading",
    "sipp.report",
)


def test_modules_that_read_records() -> None:
    assert heavy_after(f"import {', '.join(LIGHT)}") == "[]"


def test_a_pruning_loads_what_it_needs_and_not_the_compiler_of_torch() -> None:
    """Which takes a second to import; and so heavy modules are noticed. A public name is loaded when asked for."""
    code = (
        "from sipp import prune; assert prune.__name__ == 'prune'; import sys; torch = sys.modules['torch']; "
        "prune(torch.nn.Linear(4, 3), torch.rand(8, 4), keep=0.5, method='sipp-det')"
    )
    assert heavy_after(code) == "['torch', 'numba']"


@pytest.mark.parametrize("task", ["list_runs(root)", "render(read_results([root]), version='')"])
def test_listing_and_drawing_runs(task: str, tmp_path: Path) -> None:
    big_run(tmp_path / "runs" / "one", methods=("sipp-det", "wt"), n_levels=2, n_seeds=1, n_layers=2)
    code = (
        "from pathlib import Path; from sipp.experiments.runs.reading import list_runs; "
        f"from sipp.report import read_results, render; root = Path({str(tmp_path / 'runs')!r}); assert {task}"
    )
    assert heavy_after(code) == "[]"


def test_descriptions_of_recipes() -> None:
    code = "from sipp.experiments.recipes import recipe_descriptions; assert len(recipe_descriptions()) > 10"
    assert heavy_after(code) == "[]"
