"""Language models from the shell: text is read by the folder's tokenizer, `sipp eval` gives its perplexity."""

import json
from pathlib import Path

import pytest
import torch
from commandline import run
from language_models import LENGTH, folder_of_language_model, some_text
from safetensors.torch import load_file, save_file

import sipp
from sipp.cli.data_option import Reader
from sipp.cli.errors import CommandError
from sipp.cli.model_option import load_model
from sipp.cli.options import InputOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, a text of 200 words, and 40 documents of 20 words as JSON lines."""
    made = folder_of_language_model(tmp_path_factory.mktemp("llama"))
    (made / "one.txt").write_text(some_text(200))
    lines = [json.dumps({"text": some_text(20, seed)}) for seed in range(1, 41)]
    (made / "many.jsonl").write_text("\n".join(lines))
    pruned = sipp.prune(load_model(f"hf:{made}"), None, keep=0.5, method="magnitude").model
    save_file({name: t.contiguous().clone() for name, t in pruned.state_dict().items()}, made / "pruned.safetensors")
    return made


def test_text_is_read_as_sequences_by_the_folders_tokenizer(folder: Path) -> None:
    reader = Reader(load_model(f"hf:{folder}"), f"hf:{folder}", InputOptions(length=8))
    drawn = reader.calibration(str(folder / "many.jsonl"), "all")
    assert drawn.n_points == 40 * (20 // 8) and "sequences of 8 tokens of many.jsonl (several documents)" in drawn.words
    first = " ".join(f"w{i}" for i in drawn.batches[0]["input_ids"][0].tolist())
    assert some_text(20, 1).startswith(first)
    held = reader.holdout(str(folder / "many.jsonl"), None)
    assert held.n_points == 40 and "one of each document" in held.words
    usual = Reader(reader.network, reader.model, InputOptions())
    assert usual.calibration(str(folder / "one.txt"), None).n_points == 200 // LENGTH


def test_what_a_length_cannot_mean_is_refused(folder: Path) -> None:
    long = Reader(load_model(f"hf:{folder}"), f"hf:{folder}", InputOptions(length=LENGTH + 1))
    with pytest.raises(CommandError, match=f"takes {LENGTH} tokens at most"):
        long.open(str(folder / "one.txt"))
    with pytest.raises(CommandError, match="for a causal language model"):
        Reader(torch.nn.Linear(2, 2), "net", InputOptions(length=9)).open("digits")


def test_eval_gives_perplexity_as_the_function_does_and_the_folders_own_dense_weights(folder: Path) -> None:
    words = ["eval", "--model", f"hf:{folder}", "--pruned", folder / "pruned.safetensors", "--data", folder / "one.txt"]
    words += ["--points", 3, "--length", 16]
    lines = run(*words).stdout
    told = json.loads(run(*words, "--out", folder / "eval.json", "--json").stdout)
    dense, pruned = load_model(f"hf:{folder}"), load_model(f"hf:{folder}", folder / "pruned.safetensors")
    tokens = torch.tensor([[int(word[1:]) for word in some_text(200).split()]])[:, :48].reshape(3, 16)
    found = sipp.perplexity(pruned, tokens, dense=dense, progress=False)
    assert told["perplexity"] == pytest.approx(found.perplexity, rel=1e-6) != told["dense_perplexity"]
    assert told["dense_perplexity"] == pytest.approx(found.dense_perplexity, rel=1e-6)
    assert (told["kl"], told["same_token"]) == (pytest.approx(found.kl), found.same_token)
    assert (told["window"], told["n_tokens"], told["n_windows"]) == (16, 45, 3)
    assert "the first 3 of 12 windows of 16 tokens" in lines and f"tokenizer of {folder}" in lines
    assert told.items() <= json.loads((folder / "eval.json").read_text()).items()


def test_buffers_that_the_network_makes_itself_may_be_in_a_file(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "pruned.safetensors")
    model = load_model(f"hf:{folder}")
    made = [name for name, _ in model.named_buffers() if name not in model.state_dict()]
    assert made, "a rotary embedding has such"
    save_file(state | {made[0]: torch.ones(3)}, tmp_path / "more.safetensors")
    load_model(f"hf:{folder}", tmp_path / "more.safetensors")
    save_file(state | {"extra": torch.ones(3)}, tmp_path / "other.safetensors")
    with pytest.raises(CommandError, match="not in the network: extra"):
        load_model(f"hf:{folder}", tmp_path / "other.safetensors")
