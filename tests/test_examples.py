"""Every script in examples/ runs as it is, and says what it is there to show."""

import importlib.util
import re
import runpy
import warnings
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SHOWS = {
    "accelerate_loop.py": r"prunable weights are not zero after training with Accelerate",
    "image_folder.py": r"With 95 % confidence, for all but at most 5 % of inputs",
    "lightning_fit.py": r"prunable weights are not zero after training with Lightning",
    "hf_trainer.py": r"prunable weights are not zero after training",
    "lstm.py": r"sipp-hybrid: \d+\.\d% at half",
    "prune_and_retrain.py": r"2,382 of 23,824 prunable weights are not zero",
    "prune_to_tolerance.py": r"checked again: the same",
    "transformer.py": r"With 95 % confidence, for all but at most 5 % of inputs",
}


NEEDS = {"hf_trainer.py": "transformers", "accelerate_loop.py": "accelerate", "lightning_fit.py": "lightning"}


def shares(text: str) -> dict[str, float]:
    """The accuracies a script prints, by what they are of."""
    return {name: float(value) for name, value in re.findall(r"^([\w ,-]+): +([\d.]+)%", text, re.M)}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_script_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = NEEDS.get(path.name)
    if needs is not None and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert re.search(SHOWS[path.name], shown), shown
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
    if path.name == "prune_and_retrain.py":
        found = shares(shown)
        assert found["pruned, retrained"] > found["pruned"] + 20, shown


def test_there_are_eight() -> None:
    assert [path.name for path in EXAMPLES] == sorted(SHOWS)
