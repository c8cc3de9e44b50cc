"""Networks that are saved or exported seldom: numbers at the ends of their range, transposed ties, other formats."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import ModelError
from sipp.results.options import Precision
from sipp.results.pruned import Pruned
from sipp.results.pruned_to import PrunedTo
from sipp.verbs.certify import certify_accuracy


def linear(scale: float, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    net = nn.Linear(8, 4).to(dtype)
    with torch.no_grad():
        net.weight.div_(net.weight.abs().max()).mul_(scale)
    return net


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("scale", [1e-300, 1e-320])
def test_weights_too_small_for_a_format_vanish_and_that_is_said(
    scale: float, values: Precision, tmp_path: Path
) -> None:
    contents = sipp.save(linear(scale, torch.float64), tmp_path / "net", values=values)
    weight = next(one for one in contents.tensors if one.names == ("weight",))
    assert weight.largest_change == 1.0 and weight.norm_change == pytest.approx(1.0)
    assert not sipp.load(tmp_path / "net")["weight"].any() and "100 %" in contents.rounding_words


def test_the_change_of_a_norm_does_not_depend_on_the_scale(tmp_path: Path) -> None:
    changes = [
        sipp.save(linear(scale, torch.float64), tmp_path / "net", values="int8").tensors[0].norm_change
        for scale in (2.0**-80, 1.0, 2.0**80)
    ]
    assert changes[0] == pytest.approx(changes[1]) == pytest.approx(changes[2]) and 0 < changes[1] < 0.01


@pytest.mark.parametrize(
    ("scale", "dtype", "values"),
    [
        (1e300, torch.float64, "int8"),  # its scale overflowed: NaN, and nothing was said to have moved
        (1e300, torch.float64, "bf16"),
        (torch.finfo(torch.float32).max, torch.float32, "int8"),  # 127 levels of a scale that was rounded up
        (torch.finfo(torch.float32).max, torch.float32, "fp16"),
    ],
)
def test_weights_too_large_for_a_format_are_refused(
    scale: float, dtype: torch.dtype, values: Precision, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"weight: a weight is too large for {values}; save with values='fp32'"):
        sipp.save(linear(scale, dtype), tmp_path / "net", values=values)
    assert not list(tmp_path.iterdir())


# --- ties -----------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """One parameter is the other's transpose, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 4))
        self.b = nn.Parameter(self.a.data.T)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a @ self.b


def test_transposed_ties_are_stored_where_a_format_can(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, path = Turned(), tmp_path / "net"
    for values in ("fp32", "lossless", "fp16", "bf16"):
        sipp.save(net, path, values=values)  # type: ignore[arg-type]
        state, back = sipp.load(path), sipp.load(path, into=Turned())
        assert torch.equal(state["a"], state["b"].T) and torch.equal(state["a"], back.a.detach())  # type: ignore[operator]
    before = path.read_bytes()
    with pytest.raises(
        ModelError, match=r"a, b share memory in two layouts \(a transposed tie\); int8 would round them differently"
    ):
        sipp.save(net, path, values="int8")
    assert path.read_bytes() == before


def test_a_file_whose_numbers_a_transposed_tie_cannot_have_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    apart, into = Turned(), Turned()
    apart.b = nn.Parameter(apart.b.detach().clone())
    sipp.save(apart, tmp_path / "net", values="int8")
    before = into.a.detach().clone()
    with pytest.raises(ModelError, match="a, b: one tensor in the model, different ones in"):
        sipp.load(tmp_path / "net", into=into)
    assert torch.equal(into.a, before)


def test_parts_of_one_memory_are_rounded(tmp_path: Path) -> None:
    """As the weights of recurrent layers lie on a GPU: rows of one memory, none of them shared."""
    torch.manual_seed(0)
    net, memory = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), torch.randn(8, 4)
    net[0].weight.data, net[1].weight.data = memory[:4], memory[4:]
    assert sipp.save(net, tmp_path / "net", values="int8").rounding_words
    sipp.load(tmp_path / "net", into=net)


# --- ONNX -----------------------------------------------------------------------------------------------------------


def test_onnx_of_a_network_in_bfloat16_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net = nn.Linear(4, 4).bfloat16()
    words = r"onnxruntime cannot run it on the CPU .*bfloat16: export model\.float\(\) with an example in float32"
    with pytest.raises(ModelError, match=words):
        sipp.export(net, tmp_path / "net.onnx", torch.rand(2, 4).bfloat16())
    assert not list(tmp_path.iterdir())


# --- what stands for a network --------------------------------------------------------------------------------------


def test_what_prune_and_prune_to_give_stands_for_its_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    data, holdout, fresh = torch.rand(100, 8), torch.rand(300, 8), torch.rand(100, 8)
    found = sipp.prune_to(net, data, holdout, epsilon=0.9, levels=(0.9, 0.5), progress=False)
    none = sipp.prune_to(net, data, holdout, epsilon=0.0, levels=(0.5,), progress=False)
    assert isinstance(found.pruned, Pruned) and found.keep < 1 and none.pruned is None
    given: list[Pruned | PrunedTo] = [found.pruned, found, none]
    for one in given:
        expected = sipp.certify(net, one.model, fresh)
        assert sipp.certify(net, one, fresh).pruned_hash == expected.pruned_hash
        assert certify_accuracy(net, one, fresh).pruned_hash == expected.pruned_hash
        path = tmp_path / "net.safetensors"
        contents = sipp.save(one, path, certificate=expected)
        assert contents.certificate_about == "stored values"
        assert (not contents.statements) == (one is none)
        assert set(contents.masks) == (set() if one is none else set(found.pruned.masks))
        assert torch.allclose(sipp.sparse(one, fresh)(fresh), one.model(fresh), atol=1e-5)
        sipp.export(one, tmp_path / "net.onnx", fresh[:2])
    with pytest.raises(sipp.errors.DataError, match="calibration"):
        sipp.certify(net, found, torch.cat([fresh, data[:5]]))  # points that chose it
