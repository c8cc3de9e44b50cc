"""--model and --weights: checkpoints as they are found, and folders of Hugging Face, of which no code runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_zoo import gpt2, mlp, wrapped
from commandline import files_in, refused, run, three_lines, told
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune as torch_prune

import sipp
from sipp.cli.networks import load_model
from sipp.results import hashing
from sipp_lab.nets import NETS, build, n_classes_in


def same(spec: str, path: Path, expected: nn.Module) -> bool:
    return hashing.of_model(load_model(spec, path)) == hashing.of_model(expected)


def test_prefixes_of_wrappers_masks_of_runs_and_old_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(3)
    net = build("digits-cnn").eval()
    state = net.state_dict()
    masks = {f"mask.{name}": torch.ones_like(value, dtype=torch.bool) for name, value in state.items()}
    save_file({**{f"model.{name}": value for name, value in state.items()}, **masks}, tmp_path / "final.safetensors")
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "ddp.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "held.pt")
    sipp.save(net, tmp_path / "small.safetensors")
    for name in ("final.safetensors", "ddp.pt", "held.pt", "small.safetensors"):
        assert same("digits-cnn", tmp_path / name, net), name
    old = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    assert len(old) < len(state)  # checkpoints from before BatchNorm counted its batches
    save_file(old, tmp_path / "old.safetensors")
    loaded = load_model("digits-cnn", tmp_path / "old.safetensors").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in old.items())
    own = {name: value + 1 for name, value in wrapped().state_dict().items()}  # its own names begin with "model."
    torch.save(own, tmp_path / "own.pt")
    found = load_model("cli_zoo:wrapped", tmp_path / "own.pt").state_dict()
    assert all(torch.equal(found[name], value) for name, value in own.items())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_checkpoint_with_masks_of_torch_is_the_network_with_zeros(prefix: str, tmp_path: Path) -> None:
    model = mlp()
    torch_prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[index]
    torch_prune.custom_from_mask(model[2], "weight", torch.full((3, 16), 0.5))  # type: ignore[index]
    torch.save({prefix + name: value for name, value in model.state_dict().items()}, tmp_path / "masked.pt")
    x = torch.rand(4, 6)
    assert torch.equal(load_model("cli_zoo:mlp", tmp_path / "masked.pt")(x), model(x))


def test_tied_weights_load_with_and_without_their_second_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the networks of transformers need it")
    state = {name: tensor.clone() for name, tensor in gpt2().state_dict().items()}
    save_file(state, tmp_path / "all.safetensors")
    del state["lm_head.weight"]
    save_file(state, tmp_path / "some.safetensors")
    for name in ("all.safetensors", "some.safetensors"):
        assert same("cli_zoo:gpt2", tmp_path / name, gpt2())


def test_as_many_classes_as_the_weights_have(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = {name: {k: v.shape for k, v in build(name, n_classes=7).state_dict().items()} for name in NETS}
    assert {n_classes_in(name, found) for name, found in shapes.items()} == {7}
    torch.save(build("resnet20", n_classes=2).state_dict(), tmp_path / "w.pt")
    assert load_model("resnet20", tmp_path / "w.pt")(torch.rand(1, 3, 16, 16)).shape == (1, 2)


def saved(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    state = mlp().state_dict()
    return lambda path: torch.save({**state, "0.weight": change(state["0.weight"])}, path)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (saved(lambda t: t[:, :5]), "size mismatch for 0.weight"),
        (lambda path: torch.save({"0.weight": torch.ones(16, 6)}, path), "not in the file: 0.bias"),
        (lambda path: torch.save({**mlp().state_dict(), "extra": torch.ones(1)}, path), "not in the network: extra"),
        (lambda path: torch.save([1, 2], path), "no state_dict"),
        (lambda path: torch.save(mlp(), path), "could not be read as weights"),
        (lambda path: path.write_bytes(b"junk"), "could not be read as weights"),
    ],
)
def test_weights_that_do_not_fit(make: Callable[[Path], object], what: str, tmp_path: Path) -> None:
    make(tmp_path / "w.pt")
    done = run("prune", "--model", "cli_zoo:mlp", "--weights", tmp_path / "w.pt", "--keep", 0.5, "--dry-run")
    refused(done, f"--weights {tmp_path / 'w.pt'}", what)


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
    lines = dict.fromkeys(" ".join(rng.choice(list("abcdefghij"), rng.integers(2, 9))) for _ in range(120))
    (folder / "sentences.txt").write_text("\n".join(lines))
    (folder / "labelled.txt").write_text("\n".join(f"{line}\t{i % 2}" for i, line in enumerate(lines)))
    return folder


class Hub:
    """What an upload asks of the hub, which refuses one that is asked for last."""

    def __init__(self, asked: list[Any]) -> None:
        self.asked = asked

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        if "no login" in self.asked:
            raise PermissionError("401 Unauthorized")
        self.asked.append((name, private, exist_ok))
        return f"https://huggingface.co/{name}"

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> None:
        files = sorted(path.name for path in folder_path.iterdir())
        self.asked.append(
            (repo_id, [name for name in files if name in ("README.md", "config.json") or "model" in name])
        )


def test_a_folder_is_pruned_measured_timed_and_exported_without_python(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, net = ["--model", f"hf:{hf}"], tmp_path / "net"
    words = ["--data", hf / "sentences.txt", "--keep", 0.6, "--method", "magnitude", "--out", net]
    done = run("prune", *model, *words)
    assert done.returncode == 0 and "sentences of sentences.txt" in done.stdout, done.stderr
    found = told("eval", *model, "--part", "logits", "--pruned", net, "--data", hf / "labelled.txt")
    assert found["accuracies"] is not None and 0 < found["error_mean"] < 10
    timed = told("bench", net, *model, "--data", hf / "sentences.txt", "--batch-size", 2)
    assert [one["n_inputs"] for one in timed["runs"]] == [1, 2]
    told("export", net, "--out", tmp_path / "out")  # which network it is, the folder says
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(hf / "model.safetensors").keys()
    asked: list[Any] = []
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: Hub(asked))
    done = run("export", net, "--out", tmp_path / "pushed", "--push", "me/half")
    assert done.stdout.endswith("uploaded to https://huggingface.co/me/half\n"), done.stderr
    assert asked == [("me/half", True, True), ("me/half", ["README.md", "config.json", "model.safetensors"])]
    asked.append("no login")
    fix = refused(run("export", net, "--out", tmp_path / "left", "--push", "me/half"), "--push me/half", "is written")
    assert "hf upload me/half" in fix and (tmp_path / "left/model.safetensors").is_file()


@pytest.mark.parametrize("wrong", ["hf:", "hf:nowhere", "hf:/dev/null"])
def test_a_folder_that_is_none_is_refused(wrong: str, hf: Path) -> None:
    done = run("prune", "--model", wrong, "--data", hf / "sentences.txt", "--keep", 0.5, "--dry-run")
    assert done.returncode == 2 and "not a folder of a Hugging Face model" in three_lines(done.stderr)[0]


@pytest.mark.parametrize(
    ("text", "what"),
    [(b"\n\n", "no sentences"), (b"\xff\xfe\x00", "could not be read"), (b"a\t1\nb\t-1\nc\t0", "2 of 3 sentences")],
)
def test_text_that_is_none_is_refused(text: bytes, what: str, hf: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(text)
    words = ["--data", tmp_path / "x.txt", "--keep", 0.5, "--dry-run"]
    refused(run("prune", "--model", f"hf:{hf}", *words), "--data", what)
    refused(run("prune", "--model", "cli_zoo:mlp", *words), "--data", "no tokenizer")


def changed(**values: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def with_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors", {"format": "pt"})

    return write


def own_code(folder: Path) -> None:
    """A class that the folder itself defines."""
    changed(model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"})(folder)
    (folder / "mine.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights cut": (lambda f: (f / "model.safetensors").write_bytes(b"\x08"), "could not be loaded"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors"),
    "code": (own_code, "needs code of its own"),
    "a weight is missing": (with_weights(lambda s: s.pop("classifier.bias")), "classifier.bias"),
    "another shape": (changed(vocab_size=10**11), "shapes in its config.json"),
    "NaN": (with_weights(lambda s: s["classifier.weight"].fill_(torch.nan)), "NaN"),
    "no tokenizer": (lambda f: [p.unlink() for p in (*f.glob("vocab*"), *f.glob("tokenizer*"))], "tokenizer"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "could not be loaded"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_folder_with_a_fault(fault: str, hf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "net"
    shutil.copytree(hf, broken)
    change, what = BROKEN[fault]
    change(broken)
    before = files_in(tmp_path)
    words = ["--model", f"hf:{broken}", "--data", broken / "sentences.txt", "--keep", 0.5, "--out", tmp_path / "out"]
    done = run("prune", *words)
    assert done.returncode == 2 and what in three_lines(done.stderr)[0], done.stderr
    assert files_in(tmp_path) == before  # nothing was written, and no code of the folder ran
