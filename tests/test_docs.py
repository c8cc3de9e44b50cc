"""Every code block in README and docs runs, every docstring example is true, every public name is documented."""

import doctest
import importlib
import inspect
import pkgutil
import re
import warnings
from pathlib import Path

import pytest

import sipp

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (page.name, i, block)
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]
# gpu_tiles needs a GPU's Triton to be imported
MODULES = [m.name for m in pkgutil.walk_packages(sipp.__path__, "sipp.") if "gpu" not in m.name]


@pytest.mark.parametrize(("page", "index", "block"), BLOCKS, ids=[f"{page}-{i}" for page, i, _ in BLOCKS])
def test_code_blocks_run(page: str, index: int, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(block, f"{page} block {index}", "exec"), {"__name__": "__main__"})
    assert block.strip()


def test_the_readme_has_blocks_to_run() -> None:
    assert sum(page == "README.md" for page, _, _ in BLOCKS) >= 2


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), verbose=False)
    assert result.failed == 0


@pytest.mark.parametrize("name", sipp.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(sipp, name)), name
    assert len(sipp.__all__) <= 20
