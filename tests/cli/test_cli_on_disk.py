"""`sipp prune-on-disk`: a folder of Hugging Face, block by block, from the shell; stopped, and nothing of it run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import Done, files_in, run, three_lines
from language_models import folder_of_language_model, language_model, sequences, some_text
from safetensors.torch import load_file, save_file

import sipp
from sipp.verbs import prune_on_disk as on_disk

pytestmark = pytest.mark.filterwarnings("ignore:.*the head, stays as it is")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = folder_of_language_model(tmp_path_factory.mktemp("on-disk") / "llama")
    (made / "text.txt").write_text(some_text(400))
    return made


def prune(folder: Path, out: Path, *more: object) -> Done:
    words = ["--data", folder / "text.txt", "--length", 16, "--points", 12, "--out", out]
    return run("prune", "--on-disk", "--model", f"hf:{folder}", *words, *more)


def logits(folder: Path) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    with torch.no_grad():
        found: torch.Tensor = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(sequences(3)).logits
    return found


def test_a_folder_goes_in_and_one_that_transformers_reads_comes_out(llama: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = prune(llama, tmp_path / "half", "--keep", 0.5, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["n_weights"], record["kept"], record["n_blocks"], record["n_inputs"]) == (3840, 1920, 2, 12)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "half")
    assert words("w7 w9")["input_ids"] == [7, 9]
    data = sipp.text(llama / "text.txt", words, length=16, n_sequences=None)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:12]
    model = language_model("Llama")
    whole = sipp.prune(model, data[order], keep=0.5, method="wanda", statements=False, progress=False)
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "half"), whole.model(sequences(3)).logits)
    told = run("eval", "--model", f"hf:{llama}", "--pruned", tmp_path / "half", "--data", llama / "text.txt", "--json")
    expected = sipp.perplexity(whole.model, data.reshape(-1)[:384].reshape(12, 32), progress=False).perplexity
    assert json.loads(told.stdout)["perplexity"] == pytest.approx(expected, rel=1e-5)


def test_a_run_that_was_stopped_goes_on_and_ends_with_the_same_bits(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = on_disk.BlockFolder.finish
    goal = ("--pattern", "2:4", "--repair")

    def stopping(self: Any, i: int, *args: Any) -> None:
        if i == 1:
            raise KeyboardInterrupt
        finish(self, i, *args)

    monkeypatch.setattr(on_disk.BlockFolder, "finish", stopping)
    assert prune(llama, tmp_path / "stopped", *goal).returncode == 130
    monkeypatch.setattr(on_disk.BlockFolder, "finish", finish)
    done = prune(llama, tmp_path / "stopped", *goal)
    assert done.returncode == 0 and "2 blocks, 1 of them by an earlier run" in done.stdout
    assert prune(llama, tmp_path / "whole", *goal).returncode == 0
    whole, stopped = (load_file(tmp_path / name / "block-00001.safetensors") for name in ("whole", "stopped"))
    assert whole.keys() == stopped.keys() and all(torch.equal(whole[name], stopped[name]) for name in whole)
    other = prune(llama, tmp_path / "stopped", "--keep", 0.5)
    assert other.returncode == 2 and "was started with other options" in three_lines(other.stderr)[0]


@pytest.mark.parametrize("words", [["--keep", 0.5, "--pattern", "2:4"], [], ["--keep", 0.5, "--method", "snip"]])
def test_what_cannot_be_meant_is_refused_before_the_work(words: list[object], llama: Path, tmp_path: Path) -> None:
    assert len(three_lines(prune(llama, tmp_path / "out", *words).stderr)) == 3
    assert not files_in(tmp_path)


def test_what_belongs_to_a_model_is_copied_and_nothing_else(llama: Path, tmp_path: Path) -> None:
    """Also from the cache of Hugging Face, where each file is a link to another folder."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "modeling.py").write_text("raise SystemExit")
    assert prune(folder, tmp_path / "out", "--keep", 0.5).returncode == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in names and not {"modeling.py", "text.txt"} & names


def test_names_without_the_prefix_of_the_network(tmp_path: Path) -> None:
    """As the first GPT-2 was published: `h.0...`, with buffers that the network no longer has."""
    folder = folder_of_language_model(tmp_path / "gpt2", "GPT2")
    (folder / "text.txt").write_text(some_text(400))
    assert prune(folder, tmp_path / "as-it-is", "--keep", 0.5).returncode == 0
    state = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    save_file(short | {"h.0.attn.bias": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    done = prune(folder, tmp_path / "short", "--keep", 0.5)
    assert done.returncode == 0, done.stderr
    assert torch.equal(logits(tmp_path / "short"), logits(tmp_path / "as-it-is"))
    index = json.loads((tmp_path / "short" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == {*short, "h.0.attn.bias"}
