"""What is exported gives the network back: in onnxruntime, and bit by bit from a Hugging Face folder."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp_lab.nets import build
from sipp_lab.nets.registry import NETS


def pruned(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = build(name).eval()
    for value in net.state_dict().values():
        if value.dim() == 1:
            value.copy_(torch.rand(value.shape) + 0.5)
    return sipp.prune(net, None, keep=0.2, method="magnitude").model.eval()


def points(name: str, n: int) -> Tensor:
    return torch.randn(n, *NETS[name].input_shape, generator=torch.Generator().manual_seed(n))


def off_by(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("name", ["digits-cnn", "lstm"])
def test_onnxruntime_reproduces_the_pruned_network(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    net = pruned(name)
    made = sipp.export(net, tmp_path / "net.onnx", points(name, 3))
    assert made.n_inputs is None and made.off_by < 1e-5 and made.n_bytes == made.path.stat().st_size
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    for n in (1, 3, 8):
        found = torch.from_numpy(session.run(None, {given.name: points(name, n).numpy()})[0])
        assert off_by(found, net(points(name, n))) < 1e-4
    alone = sipp.export(net, tmp_path / "net.onnx", points(name, 1))  # over the first, in one step
    assert alone.n_inputs == 1 and "it takes 1 input at a time only" in str(alone)


def test_a_folder_that_from_pretrained_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).eval()
    net = sipp.prune(bert, None, keep=0.3, method="magnitude").model
    made = sipp.export(net, tmp_path / "net")
    assert {"config.json", "model.safetensors"} <= {path.name for path in made.path.iterdir()}
    back = transformers.BertModel.from_pretrained(made.path)
    words = torch.arange(12).reshape(2, 6)
    assert torch.equal(back(words).last_hidden_state, net(words).last_hidden_state)
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in net.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["net"]
    before = (tmp_path / "net" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(OptionError, match="exists and is not an empty folder"):
        sipp.export(net, tmp_path / "net")
    assert (tmp_path / "net" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["digits-cnn", "lstm"])
def test_an_onnx_file_without_zeros_is_smaller_and_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    net, x = pruned(name), points(name, 3)
    plain = sipp.export(net, tmp_path / "plain.onnx", x)
    small = sipp.export(net, tmp_path / "small.onnx", x, sparse=True)
    assert small.n_sparse > plain.n_sparse == 0 and "without their zeros" in small.sentence
    assert small.n_bytes < 0.8 * plain.n_bytes
    onnx.checker.check_model(str(small.path))
    found = []
    for path in (plain.path, small.path):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found.append(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    assert (found[0] == found[1]).all()
    dense = sipp.export(build(name).eval(), tmp_path / "dense.onnx", x, sparse=True)
    assert dense.n_sparse == 0, "a tensor that would not get smaller stays as it is"


def test_a_folder_has_a_model_card_of_what_is_known(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).eval()
    bert.config._name_or_path = "someone/bert"
    words = torch.randint(0, 50, (300, 6))
    record = sipp.prune(bert, [{"input_ids": words[:100]}], keep=0.5, method="magnitude")
    claim = sipp.certify(bert, record, [{"input_ids": words[100:]}], output="last_hidden_state")
    sipp.export(record, tmp_path / "with", certificate=claim)
    card = (tmp_path / "with" / "README.md").read_text()
    head, body = card.removeprefix("---\n").split("\n---\n")
    assert "base_model: someone/bert" in head.splitlines() and "library_name: transformers" in head.splitlines()
    assert f"{record.kept:,} of {record.n_weights:,}" in body and claim.sentence in body and "# with" in body
    sipp.export(record, tmp_path / "rounded", values="bf16", certificate=claim)
    assert "rounded to bf16; what follows is about the network before" in (tmp_path / "rounded/README.md").read_text()
    sipp.export(record.model, tmp_path / "plain")
    assert not (tmp_path / "plain" / "README.md").exists(), "nothing is known of a plain network"
    with pytest.raises(OptionError, match="about another network"):
        sipp.export(sipp.prune(bert, None, keep=0.2, method="magnitude"), tmp_path / "no", certificate=claim)
    with torch.no_grad():
        record.model.get_parameter(record.layers[0].name).mul_(2)
    sipp.export(record, tmp_path / "trained")
    assert claim.sentence not in (tmp_path / "trained" / "README.md").read_text()


class Fickle(nn.Module):
    """Gives another output each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.rand(3)


class Undecided(nn.Module):
    """Goes another way for other numbers, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if bool(x.sum() > 0) else x


def test_what_cannot_be_exported_is_refused_and_nothing_written(tmp_path: Path) -> None:
    linear, x, path = nn.Linear(3, 3), torch.ones(2, 3), tmp_path / "net.onnx"
    with pytest.raises(ModelError, match="onnxruntime differs from the network by"):
        sipp.export(Fickle(), path, x)
    with pytest.raises(ModelError, match=r"torch.export cannot trace it .*torch\.save"):
        sipp.export(Undecided(), path, x)
    with pytest.raises(ModelError, match="Linear has no save_pretrained"):
        sipp.export(linear, tmp_path / "net")
    with pytest.raises(ModelError, match=r"not an nn\.Module"):
        sipp.export({}, path, x)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="an ONNX file needs an example"):
        sipp.export(linear, path)
    with pytest.raises(OptionError, match=r"a Hugging Face folder needs no example.*net\.onnx"):
        sipp.export(linear, tmp_path / "net", x)
    for name, words in {
        "net.pt": r"torch\.save",
        "net.pt2": r"torch\.export\.save",
        "a.safetensors": "sipp.save",
    }.items():
        with pytest.raises(OptionError, match=words):
            sipp.export(linear, tmp_path / name, x)
    with pytest.raises(OptionError, match="are for a folder"):
        sipp.export(linear, path, x, values="bf16")
    with pytest.raises(OptionError, match="a folder contains all zeros"):
        sipp.export(linear, tmp_path / "net", sparse=True)
    with pytest.raises(OptionError, match="not a path"):
        sipp.export(linear, "")
    with pytest.raises(DataError, match="example"):
        sipp.export(linear, path, torch.ones(2, 4))
    with pytest.raises(DataError, match="could not be written"):
        sipp.export(linear, tmp_path / "absent" / "net.onnx", x)
    assert not list(tmp_path.iterdir())
