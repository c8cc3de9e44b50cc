"""What was found broken, or hard, when the commands were tried as a new user would: each by the command itself."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import Done, refused, run
from language_models import LENGTH, folder_of_language_model, some_text
from torch import nn

import sipp
from sipp.errors import OptionError, UnknownOption
from sipp.report.results import read_pruned_result
from sipp.report.summary import lead, next_steps, tiles_of
from sipp.results.blend import BlendChoice, BlendTrial
from sipp.results.certificate import AccuracyCertificate, Certificate

NET = """
import torch

def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a network in own_net.py, its weights, and labelled inputs."""
    monkeypatch.chdir(tmp_path)
    Path("own_net.py").write_text(NET)
    namespace: dict[str, object] = {}
    exec(NET, namespace)
    net = namespace["net"]()  # type: ignore[operator]
    torch.save(net.state_dict(), "net.pt")
    torch.save(net, "whole.pt")
    for name, seed in (("data", 0), ("new", 1)):
        x = torch.randn(400, 6, generator=torch.Generator().manual_seed(seed))
        np.savez(f"{name}.npz", inputs=x.numpy(), labels=net(x).argmax(1).numpy())
    return tmp_path


def prune(*more: object) -> Done:
    net = ["--model", "own_net.py:net", "--weights", "net.pt", "--data", "data.npz"]
    return run("prune", *net, "--keep", 0.5, "--method", "magnitude", "--out", "sparse", *more)


def test_a_network_is_named_by_its_file(here: Path) -> None:
    assert prune().returncode == 0
    refused(run("prune", "--model", "own_net.py", "--keep", 0.5, "--dry-run"), "--model", "is a file of code")
    refused(run("prune", "--model", "net.pt", "--keep", 0.5, "--dry-run"), "--model", "holds weights")
    done = run("prune", "--model", "own_net.py:net", "--weights", "whole.pt", "--keep", 0.5, "--dry-run")
    refused(done, "--weights", "could not be read")
    assert "torch.save(model.state_dict(), ...)" in done.stderr


def test_inputs_may_be_a_saved_tensor_or_have_the_names_of_mathematics(here: Path) -> None:
    held = np.load("data.npz")
    x, y = torch.from_numpy(held["inputs"]), torch.from_numpy(held["labels"])
    np.savez("xy.npz", x=x.numpy(), y=y.numpy())
    torch.save(x, "x.pt")
    torch.save((x, y), "pair.pt")
    torch.save({"inputs": x, "labels": y}, "dict.pt")
    assert prune().returncode == 0
    measured = {}
    for name in ("data.npz", "xy.npz", "x.pt", "pair.pt", "dict.pt"):
        words = ["--model", "own_net.py:net", "--dense", "net.pt", "--pruned", "sparse", "--data", name]
        done = run("eval", *words, "--json")
        assert done.returncode == 0, done.stderr
        measured[name] = json.loads(done.stdout)
    hashes = {found["data_hash"] for found in measured.values()}
    assert len(hashes) == 1 and measured["xy.npz"]["dense"]["top1"] == 1.0
    assert measured["x.pt"]["dense"] is None and measured["pair.pt"]["dense"] == measured["dict.pt"]["dense"]
    torch.save([1, "two", 3], "list.pt")
    refused(run("eval", *words[:-1], "list.pt"), "--data", "it holds a list")
    torch.save(nn.Linear(2, 2), "model.pt")
    refused(run("eval", *words[:-1], "model.pt"), "--data", "holds a pickle")


def test_the_commands_that_the_page_suggests_run_when_pasted(here: Path) -> None:
    (here / "deeper").mkdir()
    assert prune("--out", "deeper/sparse").returncode == 0
    tried = []
    for _ in range(3):  # each command adds what its page then no longer asks for
        model = read_pruned_result(Path("deeper/sparse"))
        for step in next_steps(model):
            if step.command.startswith("sipp ") and "..." not in step.command and step.command not in tried:
                tried.append(step.command)
                done = run(*shlex.split(step.command.replace(" NEW", " new.npz"))[1:])
                assert done.returncode == 0, (step.command, done.stderr)
    assert {command.split()[1] for command in tried} == {"eval", "certify", "bench", "export"}
    assert run("report", "deeper/sparse", "--out", "page.html").returncode == 0
    page = Path("page.html").read_text()
    assert "not measured" not in page and "sipp eval" not in page.partition("</article>")[0].partition("next")[2][:2000]


def test_a_program_is_told_what_python_does(here: Path) -> None:
    pruned = sipp.prune(nn.Linear(6, 3), None, keep=0.5, method="magnitude")
    sipp.save_folder(pruned, "mine")
    model = read_pruned_result(Path("mine"))
    assert [step.command for step in next_steps(model) if "sipp " in step.command] == []


def test_accuracies_of_a_certificate_are_on_the_page(here: Path) -> None:
    assert prune().returncode == 0
    words = ["--model", "own_net.py:net", "--dense", "net.pt", "--pruned", "sparse", "--holdout", "new.npz"]
    assert run("certify", *words, "--accuracy", "--out", "sparse/accuracy.json").returncode == 0
    measured = json.loads(run("eval", *words[:-2], "--data", "new.npz", "--json").stdout)
    found = read_pruned_result(Path("sparse"))
    assert found.accuracies == (measured["dense"]["top1"], measured["pruned"]["top1"])
    assert f"the accuracy is {100 * found.accuracies[1]:.4g} %" in lead(found).heading
    assert tiles_of(found)[0].value != "not measured"
    assert not any("Measure its accuracy" in step.words for step in next_steps(found))


def accuracy_certificate(**changes: object) -> AccuracyCertificate:
    values: dict[str, object] = {
        "mode": "labels", "confidence": 0.95, "n_lost": 0, "n_gained": 400, "n_differ": 400, "n": 1000,
        "n_duplicates": 0, "data_hash": "a", "dense_hash": "b", "pruned_hash": "c", "dtype": "float32", "output": None,
        "calibration_checked": True,
    }  # fmt: skip
    return AccuracyCertificate(**values | changes)  # type: ignore[arg-type]


def test_a_drop_below_zero_is_called_a_rise() -> None:
    rises = accuracy_certificate()
    assert rises.drop_upper < 0
    limit = f"raises the accuracy by at least {100 * -rises.drop_upper:.2f}"[:-1]  # rounded down
    assert limit in rises.sentence and "-" not in rises.sentence.partition(":")[0] and limit in str(rises)
    assert "lowers the accuracy by at most" in accuracy_certificate(n_gained=0, n_lost=9).sentence


def test_certificates_of_tokens_are_told_in_tokens() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    pruned = sipp.prune(net, None, keep=0.5, method="magnitude")
    windows = torch.randint(0, 9, (200, 6))
    kl = sipp.certify(net, pruned, windows, measure="kl", progress=False)
    assert isinstance(kl, Certificate) and "nats" in str(kl) and "of its norm" not in str(kl)
    tokens = str(sipp.certify_accuracy(net, pruned, windows, progress=False))
    assert "another next token" in tokens and "n_lost" not in tokens and "right before" not in tokens


def test_the_rule_by_which_a_smaller_error_is_passed_over_is_printed() -> None:
    magnitude, sensitivity = BlendTrial(0.0, "max", 0.52), BlendTrial(1.0, "max", 0.50)
    assert "a lead of less than 10 % counts as chance" in BlendChoice(magnitude, (magnitude, sensitivity), 250).sentence
    assert "chance" not in BlendChoice(sensitivity, (magnitude, sensitivity), 250).sentence
    lost = BlendTrial(0.0, "max", 1.26), BlendTrial(1.0, "max", 1.19)
    assert "the simplest score was taken" in BlendChoice(lost[0], lost, 250).sentence


def test_a_page_is_replaced_only_when_asked_in_python_as_in_the_shell(here: Path) -> None:
    pruned = sipp.prune(nn.Linear(6, 3), None, keep=0.5, method="magnitude")
    Path("page.html").write_text("mine")
    with pytest.raises(OptionError, match="exists"):
        sipp.page(pruned)
    assert Path("page.html").read_text() == "mine"
    assert "<html" in sipp.page(pruned, force=True).read_text()


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("structured", True, "sipp.shrink"),
        ("ignored_layers", ["head"], "exclude="),
        ("example_inputs", 1, "second argument"),
        ("importance", "l1", "method="),
        ("amount", 0.9, "keep=0.1"),
    ],
)
def test_options_of_other_libraries_are_translated(option: str, value: object, word: str) -> None:
    with pytest.raises(UnknownOption, match=word):
        sipp.prune(nn.Linear(6, 3), None, **{option: value})


def test_given_weights_are_not_pruned_with_given(here: Path) -> None:
    net = nn.Linear(6, 3)
    other = nn.Linear(6, 3)
    sipp.save_folder(sipp.assess(net, other, torch.randn(50, 6)), "assessed")
    assert lead(read_pruned_result(Path("assessed"))).detail.startswith("Given weights: ")


# --- a language model -------------------------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny Llama in llama/ and texts; the current folder."""
    monkeypatch.chdir(tmp_path)
    folder_of_language_model(tmp_path / "llama")
    for name in ("train", "new"):
        lines = [json.dumps({"text": some_text(20, seed)}) for seed in range(60 if name == "train" else 70, 140)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_bench_takes_causal_language_models(llama: Path) -> None:
    model = ["--model", "hf:llama"]
    prune = run(
        "prune", *model, "--data", "train.jsonl", "--length", 8, "--keep", 0.5, "--method", "wanda", "--out", "net"
    )
    assert prune.returncode == 0, prune.stderr
    config = json.loads(Path("llama/config.json").read_text())
    assert config.get("use_cache", True)
    done = run("bench", "net", "--data", "train.jsonl", "--length", 8, "--batch-size", 4, "--out", "net/bench.json")
    assert done.returncode == 0, done.stderr
    assert [one["n_inputs"] for one in json.loads(Path("net/bench.json").read_text())["runs"]] == [1, 4]
    without = run("bench", "net", "--data", "train.jsonl", "--batch-size", 2)  # of 20 words each
    refused(without, "--data", f"none has {LENGTH} tokens")
    assert "give a smaller --length" in without.stderr
    long = run("bench", "net", "--data", "train.jsonl", "--length", LENGTH + 1)
    refused(long, "--data", f"takes {LENGTH} tokens at most")
    assert f"give --length {LENGTH} or less" in long.stderr


def test_the_page_of_a_language_model_shows_its_perplexity(llama: Path) -> None:
    model = ["--model", "hf:llama"]
    words = ["--data", "train.jsonl", "--length", 8, "--keep", 0.5, "--method", "magnitude", "--out", "net"]
    assert run("prune", *model, *words).returncode == 0
    new = ["--data", "new.jsonl", "--length", 8]
    done = run("eval", *model, "--pruned", "net", *new, "--out", "net/eval.json")
    assert done.returncode == 0, done.stderr
    found = read_pruned_result(Path("net"))
    scores = found.text_scores
    assert scores is not None and scores.dense_perplexity is not None and scores.dense_hash and scores.pruned_hash
    assert f"the perplexity is {scores.perplexity:.2f} (before: {scores.dense_perplexity:.2f})" in lead(found).heading
    assert tiles_of(found)[0].name == "perplexity"
    assert not any("sipp eval" in step.command for step in next_steps(found))
    assert run("report", "net", "--out", "page.html").returncode == 0
    page = Path("page.html").read_text()
    assert "not finite" not in page and f"{scores.perplexity:.2f}" in page
