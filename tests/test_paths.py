"""The paths of a first hour, in examples/paths, run to their end, and use only what README, tutorials and how-to say.

Lines of the shell run in this process; `.ci/wheel` runs one of the scripts by bash.
"""

import ast
import importlib.util
import io
import json
import re
import runpy
import shlex
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from shorter import narrow_resnets, shorten

from sipp.cli.errors import run_and_report
from sipp.cli.main import app

ROOT = Path(__file__).parent.parent
PATHS = ROOT / "examples" / "paths"
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/scripts.md",
    *(ROOT / "docs").glob("tutorials/*"),
    *(ROOT / "docs").glob("how-to/*"),
]
SAID = "".join(page.read_text() for page in PAGES)
NOTEBOOK = "notebook.ipynb"  # run by tests/integration/test_notebook.py
# what a path is given, which package it needs, what it must leave behind and say
ENDS = {
    "own_cnn.py": (
        "",
        "",
        ["net.sipp.safetensors", "page.html"],
        r"pruning lowers the accuracy by at most [\d.]+ percentage",
    ),
    "papers_experiment.sh": ("", "", ["page.html"], r"nothing left to do[\s\S]*finished"),
    "hf_transformer.py": (
        "bert train.txt new.txt",
        "transformers",
        ["assessed/model.safetensors", "page.html", "sparse"],
        r"in the folder",
    ),
    "audio_lstm.py": ("", "", ["spotter.sipp.safetensors", "page.html"], r"certified at keep [\d.]+%"),
    "shell_only.sh": (
        "",
        "",
        ["sparse/accuracy.json", "sparse/eval.json", "small.safetensors", "page.html", "small.onnx"],
        r"x smaller [\s\S]* inputs per call",
    ),
    "shell_images.sh": ("", "PIL", ["sparse/eval.json", "page.html"], r"2 classes[\s\S]*accuracy: +[\d.]+% pruned"),
    "researcher.py": ("", "", ["page.html"], r"mine: [\d.]+% right after retraining"),
    "training_frameworks.py": (
        "",
        "pytorch_lightning",
        ["stopped.ckpt", "net.sipp.safetensors", "page.html"],
        r"947 of 9,472 prunable weights are not zero after the resumed training",
    ),
    "shell_hugging_face.sh": ("", "transformers", ["sparse/bench.json", "page.html", "sparse-bert"], "inputs per call"),
}


def lines_of(script: str) -> list[str]:
    """The commands of a script for the shell, which are all of `sipp`."""
    lines = [line for line in script.replace("\\\n", "").splitlines() if line and not line.startswith(("#", "set -"))]
    assert lines and all(line.startswith("sipp ") for line in lines)
    return lines


def shell(script: str) -> str:
    """What the commands print; each must end with 0."""
    out = io.StringIO()
    for line in lines_of(script):
        words = shlex.split(line)[1:]
        with redirect_stdout(out), redirect_stderr(out), pytest.MonkeyPatch.context() as patch:
            shorten(words[0], patch)
            status = run_and_report(app, words)
        assert status == 0, f"{line}\n{out.getvalue()}"
    return out.getvalue()


def python(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the script prints, run with these words behind its name."""
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    out = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(out):
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that stand for a user's own."""
    folder = tmp_path_factory.mktemp("given")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        narrow_resnets(monkeypatch)
        python(PATHS / "stand_ins.py", [], monkeypatch)
    return folder


@pytest.mark.parametrize("name", ENDS)
def test_the_path_reaches_its_end(name: str, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, needs, left, said = ENDS[name]
    if needs and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    for path in given.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my", raising=False)
    narrow_resnets(monkeypatch)
    path = PATHS / name
    shown = shell(path.read_text()) if path.suffix == ".sh" else python(path, words.split(), monkeypatch)
    assert re.search(said, shown), shown
    assert all((tmp_path / one).exists() for one in left)


# --- nothing is used that is not said ------------------------------------------------------------------------------


def used_in_python(text: str) -> set[str]:
    """The names of sipp, the imports from inside it and the options of such calls, as they would stand in the pages."""
    tree = ast.parse(text)
    found: set[str] = set()
    inside: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sipp"):
            inside |= {alias.name for alias in node.names}
            found |= {rf"from {node.module} import [\w, ]*\b{alias.name}\b" for alias in node.names}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sipp":
            found.add(rf"\bsipp\.{node.attr}\b")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("sipp.", *inside)):
            found |= {rf"\b{word.arg}=" for word in node.keywords if word.arg}
    return found


def used_in_shell(text: str) -> set[str]:
    """The commands, their options and the keys of recipes."""
    found = set()
    for line in lines_of(text):
        words = shlex.split(line)
        found.add(rf"\bsipp {words[1]}\b")
        found |= {rf"(?<![\w-]){re.escape(word)}\b" for word in words[2:] if word.startswith("-")}
        found |= {rf"\b{re.escape(key)}\b" for key in re.findall(r"--set \"?([\w.]+)=", line)}
    return found


def code_of(name: str, text: str) -> str:
    """The code of a notebook; other texts as they are."""
    if not name.endswith(".ipynb"):
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


def unsaid(name: str, text: str) -> list[str]:
    """What a path uses and the pages do not say."""
    text = code_of(name, text)
    used = used_in_shell(text) if name.endswith(".sh") else used_in_python(text)
    return sorted(one for one in used if not re.search(one, SAID))


@pytest.mark.parametrize("name", [*ENDS, NOTEBOOK])
def test_the_path_uses_only_what_the_pages_say(name: str) -> None:
    assert unsaid(name, (PATHS / name).read_text()) == []


def test_the_docs_count_the_calls_of_each_path() -> None:
    said = dict(re.findall(r"^\| `([\w.]+)` \|[^|]*\| (\d+) \| \d+ s \| \d+ s \|$", SAID, re.M))
    assert len(said) >= 5
    for name, n_calls in said.items():
        text = (PATHS / name).read_text()
        in_code = len(re.findall(r"\bsipp\.\w+\(|\bexport\(", text))
        assert int(n_calls) == (len(lines_of(text)) if name.endswith(".sh") else in_code), name


def test_every_path_is_run() -> None:
    assert {path.name for path in PATHS.iterdir() if path.is_file()} == {*ENDS, "stand_ins.py", NOTEBOOK}
