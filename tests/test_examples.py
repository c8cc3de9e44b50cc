"""Every script in examples/ runs as it is, and prints what it is there to show, and what the docs say it prints."""

import importlib.util
import re
import runpy
import warnings
from pathlib import Path

import pytest
from shorter import narrow_resnets

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
PRINTED = dict(re.findall(r"^```text\n\$ python examples/(\S+)\n(.*?)^```", PAGES, re.S | re.M))
SHOWS = {
    "accelerate_loop.py": r"prunable weights are not zero after training with Accelerate",
    "image_folder.py": r"With 95 % confidence, for all but at most 5 % of inputs",
    "lightning_fit.py": r"prunable weights are not zero after training with Lightning",
    "hf_trainer.py": r"prunable weights are not zero after training",
    "language_model.py": r"same next token.*prunable weights are not zero after training",
    "lora.py": r"while LoRA trains: perplexity .* prunable weights are not zero",
    "lstm.py": r"sipp-hybrid: \d+\.\d% at half",
    "prune_and_retrain.py": r"2,382 of 23,824 prunable weights are not zero",
    "prune_to_tolerance.py": r"made again: the same",
    "transformer.py": r"With 95 % confidence, for all but at most 5 % of inputs",
}


NEEDS = {
    "hf_trainer.py": "transformers",
    "language_model.py": "transformers",
    "lora.py": "peft",
    "accelerate_loop.py": "accelerate",
    "lightning_fit.py": "pytorch_lightning",
}


def without_numbers(text: str) -> list[str]:
    """The lines with one sign for every number: seconds differ everywhere, and the last digits between processors."""
    return [re.sub(r"\d[\d,.]*", "#", " ".join(line.split())) for line in text.strip().splitlines()]


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
    narrow_resnets(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    assert re.search(SHOWS[path.name], shown, re.S), shown
    if path.name in PRINTED:
        assert without_numbers(shown) == without_numbers(PRINTED[path.name])
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
    if path.name == "prune_and_retrain.py":
        found = shares(shown)
        assert found["pruned, retrained"] > found["pruned"] + 20, shown


def test_every_example_is_tested() -> None:
    assert [path.name for path in EXAMPLES] == sorted(SHOWS)


def test_the_docs_show_what_an_example_prints() -> None:
    assert sorted(PRINTED) == ["image_folder.py"]
    assert all(len(path.read_text().splitlines()) <= 60 for path in EXAMPLES)
    assert without_numbers("a 1,234.5 b") == without_numbers("a  7 b") != without_numbers("a 7 c")
