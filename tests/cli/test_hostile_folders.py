"""Fault 53: of a Hugging Face folder from others no code runs, whatever is asked for on the way."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commandline import run, three_lines
from language_models import folder_of_language_model, some_text

MINE = {
    "AutoConfig": "mine.Config",
    "AutoModel": "mine.Model",
    "AutoModelForCausalLM": "mine.Model",
    "AutoTokenizer": ["mine.Slow", "mine.Fast"],
}


class Payload:
    """Unpickling it leaves a file behind."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.ran,)


def add(path: Path, **values: object) -> None:
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | values))


def code(folder: Path, ran: Path) -> None:
    """Code of its own for everything."""
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')")
    add(folder / "config.json", model_type="mine", auto_map=MINE, trust_remote_code=True)
    add(folder / "tokenizer_config.json", auto_map=MINE, tokenizer_class="Fast")


def code_for_words(folder: Path, ran: Path) -> None:
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')")
    add(folder / "tokenizer_config.json", auto_map=MINE, tokenizer_class="Fast")


def pickles(folder: Path, ran: Path) -> None:
    """Weights by torch.save alone."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(ran)))


def pickled_safetensors(folder: Path, ran: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload(ran)))


@pytest.mark.parametrize("change", [code, code_for_words, pickles, pickled_safetensors])
@pytest.mark.parametrize("command", ["prune", "prune-on-disk"])
def test_no_code_of_a_folder_runs(command: str, change: Callable[[Path, Path], None], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder, ran = folder_of_language_model(tmp_path / "theirs"), tmp_path / "ran"
    (tmp_path / "text.txt").write_text(some_text(400))
    change(folder, ran)
    words = ["--data", tmp_path / "text.txt", "--length", 16, "--points", 12, "--out", tmp_path / "out"]
    done = run(command, "--model", f"hf:{folder}", "--keep", 0.5, *words)
    assert not ran.exists()
    if change is not code_for_words or done.returncode:  # a tokenizer of a known kind is read without its code
        assert done.returncode == 2 and three_lines(done.stderr) and not (tmp_path / "out").exists()
