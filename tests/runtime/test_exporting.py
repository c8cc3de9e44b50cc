"""What is exported gives the network back: in onnxruntime, as a program of torch, bit by bit in files of weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.runtime.exported import Target
from sipp.runtime.exporting import export
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
    made = export(net, tmp_path / "net.onnx", to="onnx", example=points(name, 3))
    assert made.n_points is None and made.off_by < 1e-5 and made.n_bytes == made.path.stat().st_size
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    for n in (1, 3, 8):
        found = torch.from_numpy(session.run(None, {given.name: points(name, n).numpy()})[0])
        assert off_by(found, net(points(name, n))) < 1e-4
    alone = export(net, tmp_path / "net.onnx", to="onnx", example=points(name, 1))  # over the first, in one step
    assert alone.n_points == 1 and "it takes 1 input at a time only" in str(alone)


def test_a_program_of_torch_export(tmp_path: Path) -> None:
    net = pruned("digits-cnn")
    made = export(net, tmp_path / "net.pt2", to="pt2", example=points("digits-cnn", 3))
    program = torch.export.load(made.path)
    assert made.n_points is None
    for n in (2, 5):
        assert off_by(program.module()(points("digits-cnn", n)), net(points("digits-cnn", n))) < 1e-6
    zeros = {name: int((value == 0).sum()) for name, value in net.state_dict().items()}
    assert {name: int((value == 0).sum()) for name, value in program.state_dict.items()} == zeros


class Tied(nn.Module):
    """Odd numbers, odd types, and one tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.half = nn.Linear(3, 3).to(torch.bfloat16)
        self.register_buffer("count", torch.tensor(7))
        with torch.no_grad():
            self.first.weight.copy_(torch.tensor([[0.0, -0.0, torch.nan], [torch.inf, 1e-45, 1.0], [0.1, 0.0, 2.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("to", ["safetensors", "pt"])
def test_files_of_weights_bit_by_bit(to: Target, tmp_path: Path) -> None:
    net = Tied().train()
    made = export(net, tmp_path / "net", to=to)
    back = load_file(made.path) if to == "safetensors" else torch.load(made.path, weights_only=True)
    assert net.training and set(back) == set(net.state_dict())
    for name, value in net.state_dict().items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
    Tied().load_state_dict(back)


def test_a_folder_that_from_pretrained_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).eval()
    net = sipp.prune(bert, None, keep=0.3, method="magnitude").model
    made = export(net, tmp_path / "net", to="hf")
    assert {"config.json", "model.safetensors"} <= {path.name for path in made.path.iterdir()}
    back = transformers.BertModel.from_pretrained(made.path)
    words = torch.arange(12).reshape(2, 6)
    assert torch.equal(back(words).last_hidden_state, net(words).last_hidden_state)
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in net.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["net"]
    before = (tmp_path / "net" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(OptionError, match="exists and is not an empty folder"):
        export(net, tmp_path / "net", to="hf")
    assert (tmp_path / "net" / "model.safetensors").stat().st_mtime_ns == before


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
    linear, x, path = nn.Linear(3, 3), torch.ones(2, 3), tmp_path / "net"
    with pytest.raises(ModelError, match="the program read back differs from the network by"):
        export(Fickle(), path, to="pt2", example=x)
    with pytest.raises(ModelError, match=r"torch.export cannot trace it .*safetensors"):
        export(Undecided(), path, to="pt2", example=x)
    with pytest.raises(ModelError, match="Linear has no save_pretrained"):
        export(linear, path, to="hf")
    with pytest.raises(ModelError, match=r"not an nn\.Module"):
        export({}, path, to="pt")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="to='pt2' needs an example"):
        export(linear, path, to="pt2")
    with pytest.raises(OptionError, match="to='pt' takes no example"):
        export(linear, path, to="pt", example=x)
    with pytest.raises(OptionError, match="to='tflite'"):
        export(linear, path, to="tflite")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="not a path"):
        export(linear, "", to="pt")
    with pytest.raises(DataError, match="example"):
        export(linear, path, to="pt2", example=torch.ones(2, 4))
    with pytest.raises(DataError, match="could not be written"):
        export(linear, tmp_path / "absent" / "net", to="pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["safetensors", "pt2"])
def test_masks_of_torch_become_zeros(to: Target, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU()), torch.randn(4, 8)
    torch_prune.l1_unstructured(model[0], "weight", 0.5)
    weight = model[0].weight.detach().clone()  # type: ignore[operator,union-attr]
    made = export(model, tmp_path / "net", to=to, example=x if to == "pt2" else None)
    if to == "pt2":
        assert torch.equal(torch.export.load(made.path).module()(x), model(x))
    else:
        found = load_file(made.path)
        assert set(found) == {"0.weight", "0.bias"} and torch.equal(found["0.weight"], weight)
    assert isinstance(model[0].weight_orig, nn.Parameter)


class Open(nn.Module):
    """A forward pass that does not name its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 6)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.a(x) for x in args]).sum(0)


def test_a_forward_pass_that_takes_any_number_of_arguments(tmp_path: Path) -> None:
    net, x, few = Open().eval(), torch.randn(4, 8), torch.randn(2, 8)
    made = export(net, tmp_path / "net.pt2", to="pt2", example=(x, x))
    found = torch.export.load(made.path).module()(few, few + 1)
    assert made.n_points is None and torch.allclose(found, net(few, few + 1), atol=1e-6)


class Writes(nn.Module):
    """A forward pass that writes to its input, which lies in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 6)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        given["x"] += 1
        return self.a(given["x"])


def test_the_example_is_left_as_it_was(tmp_path: Path) -> None:
    net, x = Writes().eval(), torch.randn(4, 8)
    before = x.clone()
    made = export(net, tmp_path / "net.pt2", to="pt2", example=({"x": x},))
    assert made.off_by < 1e-6 and torch.equal(x, before)
    with pytest.raises(ModelError, match="changes input 1"):
        sipp.sparse(net, ({"x": x},))
    assert torch.equal(x, before)
