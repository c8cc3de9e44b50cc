"""Language models from the shell: text as data, perplexity, the page, and pruning on the disk, block by block."""

import json
from pathlib import Path

import pytest
import torch
from commandline import Done, refused, run, three_lines, told
from language_models import LENGTH, folder_of_language_model, language_model, sequences, some_text
from safetensors.torch import load_file, save_file

import sipp
from sipp.cli.networks import load_model

pytestmark = pytest.mark.filterwarnings("ignore:.*the head, stays as it is")
MODEL = ["--model", "hf:llama"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a tiny Llama, a text of 400 words, and documents of 20 words as JSON lines."""
    monkeypatch.chdir(tmp_path)
    folder_of_language_model(Path("llama"))
    Path("one.txt").write_text(some_text(400))
    for name, seeds in (("train", range(60)), ("new", range(60, 140))):
        lines = [json.dumps({"text": some_text(20, seed)}) for seed in seeds]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def tokens(n: int, length: int) -> torch.Tensor:
    words = [int(word[1:]) for word in some_text(400).split()]
    return torch.tensor(words[: n * length]).reshape(n, length)


def test_text_is_pruned_with_certified_and_measured(here: Path) -> None:
    cheap = ["--length", 8, "--keep", 0.5, "--method", "magnitude", "--out", "net"]
    record = told("prune", *MODEL, "--data", "train.jsonl", "--points", 50, *cheap)
    assert "50 of 120 sequences of 8 tokens of train.jsonl" in record["data"]["what"]
    both, new = [*MODEL, "--pruned", "net"], ["--data", "new.jsonl", "--length", 8]
    certificate = told("certify", *both, "--holdout", "new.jsonl", "--length", 8, "--measure", "kl")
    assert certificate["n"] == 80 and certificate["measure"] == "kl"  # one sequence a document
    lines = run("eval", *both, "--data", "one.txt", "--length", 16, "--points", 3).stdout
    assert "the first 3 of 25 windows of 16 tokens" in lines and "tokenizer of llama" in lines
    found = told("eval", *both, "--data", "one.txt", "--length", 16, "--points", 3)
    dense, pruned = load_model("hf:llama"), load_model("hf:llama", Path("net"))
    expected = sipp.perplexity(pruned, tokens(3, 16), dense=dense, progress=False)
    assert found["perplexity"] == pytest.approx(expected.perplexity, rel=1e-6) != found["dense_perplexity"]
    assert (found["kl"], found["n_tokens"]) == (pytest.approx(expected.kl), 45)
    measured = told("eval", *both, *new, "--out", "net/eval.json")
    timed = told("bench", "net", "--data", "train.jsonl", "--length", 8, "--batch-size", 4, "--out", "net/bench.json")
    assert [one["n_inputs"] for one in timed["runs"]] == [1, 4]
    told("report", "net", "--out", "page.html")
    page = Path("page.html").read_text()
    shown = f"the perplexity is {measured['perplexity']:.2f} (before: {measured['dense_perplexity']:.2f})"
    assert shown in page and "not finite" not in page and "sipp eval" not in page.partition("</article>")[0]


def test_what_a_length_cannot_mean_is_refused(here: Path) -> None:
    words = ["prune", *MODEL, "--data", "one.txt", "--keep", 0.5, "--dry-run"]
    assert "or less" in refused(run(*words, "--length", LENGTH + 1), "--data", f"accepts at most {LENGTH} tokens")
    other = ["prune", "--model", "digits-cnn", "--data", "digits", "--keep", 0.5, "--dry-run", "--length", 9]
    refused(run(*other), "--data", "for a causal language model")
    short = ["prune", *MODEL, "--data", "train.jsonl", "--keep", 0.5, "--dry-run"]  # of 20 words each
    assert "--length" in refused(run(*short), "--data", f"none of 60 documents has {LENGTH} tokens")


# --- on the disk ------------------------------------------------------------------------------------------------------


def on_disk_pruned(out: str, *more: object, model: str = "llama") -> Done:
    words = ["--data", "one.txt", "--length", 16, "--points", 12, "--out", out]
    return run("prune", "--on-disk", "--model", f"hf:{model}", *words, *more)


def test_a_folder_goes_in_and_one_that_transformers_reads_comes_out(here: Path) -> None:
    transformers = pytest.importorskip("transformers")
    Path("llama/modeling.py").write_text("raise SystemExit")
    record = json.loads(on_disk_pruned("half", "--keep", 0.5, "--json").stdout)
    assert (record["n_weights"], record["kept"], record["n_blocks"], record["n_inputs"]) == (3840, 1920, 2, 12)
    words = transformers.AutoTokenizer.from_pretrained("half")
    assert words("w7 w9")["input_ids"] == [7, 9] and not Path("half/modeling.py").exists()
    data = sipp.text("one.txt", words, length=16, n_sequences=None)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:12]
    model = language_model("Llama")
    whole = sipp.prune(model, data[order], keep=0.5, method="wanda", statements=False, progress=False)
    with torch.no_grad():
        read = transformers.AutoModelForCausalLM.from_pretrained("half").eval()
        assert torch.equal(read(sequences(3)).logits, whole.model(sequences(3)).logits)
    found = told("eval", *MODEL, "--pruned", "half", "--data", "one.txt")
    expected = sipp.perplexity(whole.model, tokens(12, LENGTH), progress=False).perplexity
    assert found["perplexity"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "words",
    [["--keep", 0.5, "--pattern", "2:4"], [], ["--keep", 0.5, "--method", "snip"], ["--keep", 0.5, "--dry-run"]],
)
def test_what_cannot_be_meant_is_refused_before_the_work(words: list[object], here: Path) -> None:
    done = on_disk_pruned("out", *words)
    assert done.returncode == 2 and three_lines(done.stderr) and not Path("out").exists()


def test_names_without_the_prefix_of_the_network(here: Path) -> None:
    """As the first GPT-2 was published: `h.0...`, with buffers that the network no longer has."""
    folder = folder_of_language_model(here / "gpt2", "GPT2")
    on_disk_pruned("as-it-is", "--keep", 0.5, model="gpt2")
    state = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    save_file(short | {"h.0.attn.bias": torch.ones(1)}, folder / "model.safetensors", {"format": "pt"})
    assert on_disk_pruned("short", "--keep", 0.5, model="gpt2").returncode == 0
    transformers = pytest.importorskip("transformers")
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(name).state_dict() for name in ("short", "as-it-is"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    index = json.loads(Path("short/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == {*short, "h.0.attn.bias"}
