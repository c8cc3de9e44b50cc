"""`sipp eval`, the accuracies of `sipp certify --accuracy`, and folders of Hugging Face with text as data."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp, wrapped
from commandline import files_in, run, three_lines
from safetensors.torch import load_file, save_file

from sipp.cli.errors import run_and_report
from sipp.cli.main import app
from sipp.cli.model_option import load_model
from sipp.verbs.evaluate import evaluate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6)).astype(np.float32)
    labels = mlp()(torch.from_numpy(x)).argmax(1).numpy()
    labels[:30] = (labels[:30] + 1) % 3  # the dense network is right on 270 of 300
    np.savez(tmp_path / "data.npz", inputs=x, labels=labels)
    np.save(tmp_path / "plain.npy", x)
    save_file(mlp().state_dict(), tmp_path / "dense.safetensors")
    words = ["--model", "cli_zoo:mlp", "--weights", tmp_path / "dense.safetensors", "--data", tmp_path / "plain.npy"]
    assert run("prune", *words, "--keep", 0.5, "--method", "magnitude", "--out", tmp_path / "net").returncode == 0
    return tmp_path


def words_of(folder: Path, *more: object) -> list[object]:
    return ["--model", "cli_zoo:mlp", "--dense", folder / "dense.safetensors", "--pruned", folder / "net", *more]


def test_accuracy_loss_and_epsilon_are_those_of_the_networks(folder: Path) -> None:
    done = run("eval", *words_of(folder, "--data", folder / "data.npz", "--json"))
    found = json.loads(done.stdout)
    arrays = np.load(folder / "data.npz")
    x, labels = (torch.from_numpy(arrays[name]) for name in ("inputs", "labels"))
    dense, pruned = mlp().eval(), mlp().eval()
    with torch.no_grad():
        pruned.load_state_dict(load_file(folder / "net" / "model.safetensors"))
        f, g = dense(x).double(), pruned(x).double()
    far = (g - f).norm(dim=1) / f.norm(dim=1)
    assert found["dense"]["top1"] == 0.9 and found["n_inputs"] == 300
    assert found["pruned"]["top1"] == float((g.argmax(1) == labels).double().mean()) < 0.9
    assert found["same_class"] == float((g.argmax(1) == f.argmax(1)).double().mean())
    assert found["dense"]["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(f, labels)), rel=1e-6)
    assert found["pruned"]["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(g, labels)), rel=1e-6)
    assert found["error_mean"] == pytest.approx(float(far.mean()), rel=1e-6)
    assert found["error_max"] == pytest.approx(float(far.max()), rel=1e-6)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_eval_shows_progress_in_a_terminal_only(
    is_terminal: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, out = StringIO(), StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", out)
    code = run_and_report(app, ["eval", *map(str, words_of(folder, "--data", folder / "plain.npy", "--json"))])
    assert code == 0 and json.loads(out.getvalue())["n_inputs"] == 300
    assert ("measuring" in stream.getvalue()) == is_terminal


def test_without_labels_there_is_no_accuracy_and_noise_is_named(folder: Path) -> None:
    done = run("eval", *words_of(folder, "--data", folder / "plain.npy"))
    assert done.returncode == 0 and "epsilon:" in done.stdout
    assert "accuracy:        not measured: plain.npy holds no array 'labels'" in done.stdout
    assert "random inputs, not on yours" in run("eval", *words_of(folder, "--data", "random:20x6")).stdout


def test_an_output_that_is_not_finite_is_never_a_small_error() -> None:
    dense, pruned = mlp().eval(), mlp().eval()
    with torch.no_grad():
        pruned[2].bias[0] = torch.nan
    found = evaluate(dense, pruned, [(torch.rand(8, 6), torch.zeros(8, dtype=torch.int64))])
    assert found.error_mean == math.inf and found.n_not_finite == 8 and found.pruned.top1 == 0.0
    assert math.isnan(found.pruned.loss) and "not finite on 8 of 8 inputs" in str(found)


def test_labels_that_are_no_class_are_named_and_no_accuracy_is_given() -> None:
    """Numbered from 1, say: one of 3 classes is then outside."""
    net, x = mlp().eval(), torch.rand(8, 6)
    found = evaluate(net, net, [(x, torch.tensor([0, 1, 2] * 2 + [0, 1])), (x, torch.tensor([3, 1] * 4))])
    assert found.dense is None and found.pruned is None
    assert "not measured: 4 labels are outside the output's classes" in str(found)


def test_an_output_that_is_not_finite_is_of_no_class() -> None:
    """The argmax of NaN is 0, which must not count as a prediction of either network."""
    model, broken = mlp(), mlp()
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    data = [(torch.rand(20, next(model.parameters()).shape[1]), torch.zeros(20, dtype=torch.int64))]
    for dense, pruned in ((broken, model), (model, broken), (broken, broken)):
        found = evaluate(dense, pruned, data)
        accuracies = found.dense.top1, found.pruned.top1
        assert all(value == 0 for net, value in zip((dense, pruned), accuracies) if net is broken)
        assert found.same_class == 0


def test_a_record_beside_the_network_is_on_its_page_until_the_network_changes(folder: Path) -> None:
    words = words_of(folder, "--data", folder / "data.npz", "--out", folder / "net" / "eval.json")
    done = run("eval", *words, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found.items() <= json.loads((folder / "net" / "eval.json").read_text()).items()
    assert f"{folder / 'net' / 'eval.json'}" in run("eval", *words, "--force").stdout
    page = folder / "page.html"
    assert run("report", folder / "net", "--out", page).returncode == 0
    accuracy = f"{found['pruned']['top1']:.2%}"
    assert f"Accuracy {accuracy} after pruning, 90.00% before" in page.read_text()
    more = [
        "--weights",
        folder / "dense.safetensors",
        "--data",
        folder / "plain.npy",
        "--method",
        "magnitude",
        "--force",
    ]
    assert run("prune", "--model", "cli_zoo:mlp", *more, "--keep", 0.4, "--out", folder / "net").returncode == 0
    done = run("report", folder / "net", "--out", page, "--force")
    assert "marked: net: eval.json is an evaluation for other networks and is not shown." in done.stdout
    assert "after pruning, 90.00%" not in page.read_text()


def test_noise_makes_no_record(folder: Path) -> None:
    done = run("eval", *words_of(folder, "--data", "random:20x6", "--out", folder / "net" / "eval.json"))
    assert done.returncode == 2 and "noise" in three_lines(done.stderr)[0]
    assert not (folder / "net" / "eval.json").exists()


def test_certify_accuracy_prints_both(folder: Path) -> None:
    done = run("certify", *words_of(folder, "--holdout", folder / "data.npz", "--accuracy"))
    assert done.returncode == 0 and "% pruned, 90.00% dense, on these inputs" in done.stdout, done.stderr


# --- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with its tokenizer, as save_pretrained writes them, and sentences."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=16, num_labels=2, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(list("abcdefghij"), rng.integers(2, 9))) for _ in range(120)]
    (folder / "sentences.txt").write_text("\n".join(dict.fromkeys(lines)))
    (folder / "labelled.txt").write_text("\n".join(f"{line}\t{i % 2}" for i, line in enumerate(dict.fromkeys(lines))))
    return folder


def test_a_folder_of_hugging_face_is_pruned_and_measured_without_python(hf: Path, tmp_path: Path) -> None:
    model = ["--model", f"hf:{hf}", "--part", "logits"]
    words = ["--data", hf / "sentences.txt", "--keep", 0.6, "--method", "magnitude", "--out", tmp_path / "net"]
    done = run("prune", *model[:2], *words)
    assert done.returncode == 0 and "sentences of sentences.txt" in done.stdout, done.stderr
    done = run(
        "eval", *model, "--dense", hf / "model.safetensors", "--pruned", tmp_path / "net",
        "--data", hf / "labelled.txt", "--json",
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["dense"] is not None and 0 < found["error_mean"] < 10, done.stderr


@pytest.mark.parametrize("wrong", ["hf:", "hf:nowhere", "hf:/dev/null"])
def test_a_folder_that_is_none_is_refused(wrong: str, hf: Path) -> None:
    done = run("prune", "--model", wrong, "--data", hf / "sentences.txt", "--keep", 0.5, "--dry-run")
    assert done.returncode == 2 and "not a folder of a Hugging Face model" in three_lines(done.stderr)[0]


@pytest.mark.parametrize("text", [b"", b"\n\n", b"\xff\xfe\x00"])
def test_text_that_is_none_is_refused(text: bytes, hf: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(text)
    done = run("prune", "--model", f"hf:{hf}", "--data", tmp_path / "x.txt", "--keep", 0.5, "--dry-run")
    assert done.returncode == 2 and three_lines(done.stderr)


def test_text_needs_a_tokenizer(hf: Path) -> None:
    done = run("prune", "--model", "cli_zoo:mlp", "--data", hf / "sentences.txt", "--keep", 0.5, "--dry-run")
    assert done.returncode == 2 and "no tokenizer" in three_lines(done.stderr)[0]


def test_a_broken_folder_is_refused(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = run("prune", "--model", f"hf:{tmp_path}", "--data", hf / "sentences.txt", "--keep", 0.5, "--dry-run")
    assert done.returncode == 2 and "could not be loaded" in three_lines(done.stderr)[0]


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def _config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _own_code(folder: Path) -> None:
    _config(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"})
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def _no_tokenizer(folder: Path) -> None:
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "4 weights cut": (_cut, "could not be loaded"),
    "4 no bytes": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "could not be loaded"),
    "5 a pickle": (_pickled, "no file named model.safetensors"),
    "5 code of its own": (_own_code, "needs code of its own"),
    "6 a weight is missing": (lambda folder: _tensors(folder, lambda s: s.pop("classifier.bias")), "classifier.bias"),
    "6 another shape": (
        lambda folder: _tensors(folder, lambda s: s.update({"classifier.weight": torch.ones(3, 16)})),
        "shapes in its config.json",
    ),
    "6 1e12 elements": (lambda folder: _config(folder, vocab_size=10**11), "shapes in its config.json"),
    "14 NaN weight": (lambda folder: _tensors(folder, lambda s: s["classifier.weight"].fill_(torch.nan)), "NaN"),
    "no tokenizer": (_no_tokenizer, "holds no tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_folder_with_a_fault(fault: str, hf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "net"
    shutil.copytree(hf, broken)
    change, words = BROKEN[fault]
    change(broken)
    before = files_in(broken)
    net = ["--model", f"hf:{broken}", "--data", broken / "sentences.txt"]
    for command in (["prune", *net, "--keep", 0.5, "--out", tmp_path / "out"], ["compare", *net, "--part", "logits"]):
        done = run(*command)
        assert done.returncode == 2 and done.stdout == "" and words in three_lines(done.stderr)[0], done.stderr
    assert files_in(broken) == before and not (tmp_path / "out").exists()


def test_what_a_folder_holds_too_much_is_named(hf: Path, tmp_path: Path) -> None:
    shutil.copytree(hf, tmp_path / "net")
    _tensors(tmp_path / "net", lambda s: s.update({"extra.weight": torch.ones(3)}))
    (tmp_path / "words.txt").write_text("\n".join(f"unheard of {i}" for i in range(9)))
    words = ["prune", "--model", f"hf:{tmp_path / 'net'}", "--data", tmp_path / "words.txt", "--dry-run"]
    done = run(*words, "--keep", 0.5, "--method", "magnitude", "--no-statements")
    assert done.returncode == 0 and "extra.weight, left out" in done.stderr
    assert "does not know 100% of the words" in done.stderr


def test_a_stored_network_of_a_folder_is_timed_and_exported(hf: Path, tmp_path: Path) -> None:
    net, text = ["--model", f"hf:{hf}"], ["--data", hf / "sentences.txt"]
    file = tmp_path / "net.safetensors"
    done = run("prune", *net, "--method", "magnitude", "--keep", 0.5, "--out", file, "--values", "bf16")
    assert done.returncode == 0, done.stderr
    done = run("bench", file, *net, *text, "--batch-size", 2)
    assert done.returncode == 0 and "; 2 inputs per call" in " ".join(done.stdout.split()), done.stderr
    assert run("export", file, *net, "--out", tmp_path / "out").returncode == 0


def test_a_checkpoint_with_masks_of_torch_is_the_network_with_zeros(folder: Path) -> None:
    model = mlp()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.utils.prune.l1_unstructured(module, "weight", 0.5)
    torch.save(model.state_dict(), folder / "masked.pt")
    assert any(name.endswith("weight_orig") for name in model.state_dict())
    words = ["--model", "cli_zoo:mlp", "--dense", folder / "dense.safetensors", "--data", folder / "data.npz", "--json"]
    done = run("eval", *words, "--pruned", folder / "masked.pt")
    arrays = np.load(folder / "data.npz")
    with torch.no_grad():
        right = model(torch.from_numpy(arrays["inputs"])).argmax(1).numpy() == arrays["labels"]
    assert json.loads(done.stdout)["pruned"]["top1"] == right.mean() < 0.9


def test_a_checkpoint_with_a_mask_of_any_numbers_is_multiplied(tmp_path: Path) -> None:
    model = mlp()
    first = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    torch.nn.utils.prune.custom_from_mask(first, "weight", torch.full_like(first.weight, 0.5))
    torch.save(model.state_dict(), tmp_path / "masked.pt")
    x = torch.rand(4, first.in_features)
    assert torch.equal(load_model("cli_zoo:mlp", tmp_path / "masked.pt")(x), model(x))


@pytest.mark.parametrize(("made", "prefix"), [("mlp", ""), ("mlp", "module."), ("mlp", "model."), ("wrapped", "")])
def test_a_checkpoint_in_which_everything_is_masked(tmp_path: Path, made: str, prefix: str) -> None:
    model = {"mlp": mlp, "wrapped": wrapped}[made]()
    for module in model.modules():
        for local, _ in [*module.named_parameters(recurse=False)]:
            torch.nn.utils.prune.l1_unstructured(module, local, 0.5)
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "masked.pt")
    x = torch.rand(4, 6)
    assert torch.equal(load_model(f"cli_zoo:{made}", tmp_path / "masked.pt")(x), model(x))
