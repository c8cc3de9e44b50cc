"""torch's default dtype and device are the caller's own: whatever they are, sipp gives the same bits."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import DataError
from sipp.native import memory
from sipp.scoring.kernels.cpu import MOST_WEIGHTS

SOURCES = Path(sipp.__file__).parent
ELSEWHERE = ("report", "cli")  # neither score nor prune
MAKERS = {"zeros", "empty", "ones", "full", "tensor", "arange", "eye", "linspace", "as_tensor"}
MAKERS |= {"rand", "randn", "randint", "randperm"}
INFERRED = {"as_tensor"}  # of labels, whose dtype is looked at

METHODS = (("sipp-det", "until"), ("sipp-hybrid", "until"), ("sipp-rand", "until"), ("sipp-rand", "fixed"))
METHODS += (("random", "until"),)

Result = dict[str, Any]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    assert before == torch.float32
    yield
    torch.set_default_dtype(before)


def on_meta() -> AbstractContextManager[Any]:
    return torch.device("meta")


def with_dtype(dtype: torch.dtype) -> Callable[[], AbstractContextManager[Any]]:
    def change() -> AbstractContextManager[Any]:
        torch.set_default_dtype(dtype)
        return nullcontext()

    return change


DEFAULTS = {
    "float64": with_dtype(torch.float64),
    "float16": with_dtype(torch.float16),
    "bfloat16": with_dtype(torch.bfloat16),
    "meta": on_meta,
}


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.lstm(x)[0]
        return self.head(states[:, -1]) + self.head(states[:, 0])  # two uses of one weight


def convolutions() -> nn.Module:
    few = nn.Conv2d(2, 4, 3, padding=1)
    assert few.weight.numel() <= MOST_WEIGHTS
    return nn.Sequential(few, nn.ReLU(), nn.Conv2d(4, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 81, 3))


def linear() -> nn.Module:
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    assert net[2].weight.numel() <= MOST_WEIGHTS < net[0].weight.numel()
    return net


MAKE: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (linear(), torch.randn(150, 20)),
    "double": lambda: (linear().double(), torch.randn(150, 20).double()),
    "conv": lambda: (convolutions(), torch.randn(5, 2, 9, 9)),
    "lstm": lambda: (Sequences(), torch.randn(30, 7, 5)),
}


def wide_range() -> tuple[nn.Module, Tensor]:
    """One with points that float32 does not hold: they go through the float64 kernels (`plain_loops.py`)."""
    net, x = linear(), torch.rand(20, 20)
    x[::3, ::2] *= 1e-38
    return net, x


MAKE["wide range"] = wide_range


def results(kind: str) -> Callable[[], Result]:
    """A function that scores and prunes, its model and data made under the defaults."""
    torch.manual_seed(1)
    net, x = MAKE[kind]()

    def work() -> Result:
        found: Result = {}
        for reduce in ("max", "mean"):
            for name, score in sipp.sensitivity(net, x, reduce=reduce).items():
                found[f"{reduce} {name}"] = score
        for method, draws in METHODS if kind == "linear" else METHODS[:2]:
            pruned = sipp.prune(net, x, keep=0.4, method=method, draws=draws, seed=5)
            how = f"{method} {draws}"
            assert method != "sipp-rand" or any("rand" in one.strategies for one in pruned.layers)
            found[f"{how} text"] = str(pruned)
            found |= {f"{how} mask {name}": mask for name, mask in pruned.masks.items()}
            found |= {f"{how} {name}": value for name, value in pruned.model.state_dict().items()}
            found |= {f"{how} eps {one.name}": one.eps_F for one in pruned.layers if one.eps_F is not None}
            found |= {f"{how} {one.name}": (one.bound, one.kappa, one.bound_measured) for one in pruned.layers}
        return found

    return work


def assert_same_bits(found: Result, wanted: Result, default: str) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype and found[name].device == value.device, (default, name)
            assert torch.equal(found[name], value), (default, name)
        else:
            assert repr(found[name]) == repr(value), (default, name)


@pytest.mark.filterwarnings("ignore::sipp.errors.DeadRowsWarning")
@pytest.mark.parametrize("kind", MAKE)
def test_the_defaults_of_torch_change_no_bit(kind: str) -> None:
    work = results(kind)
    wanted = work()
    for name, change in DEFAULTS.items():
        with change():
            found = work()
        torch.set_default_dtype(torch.float32)
        assert_same_bits(found, wanted, name)


def test_compiled_code_refuses_other_dtypes_devices_and_layouts() -> None:
    memory.address(memory.blank(3, 4))
    memory.address(memory.zeros(3, dtype=torch.int64), torch.int64)
    for wrong in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, device="meta"), torch.zeros(3, 4).t()):
        with pytest.raises(DataError, match="compiled code"):
            memory.address(wrong)


def calls_in(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def test_every_tensor_that_is_made_names_its_dtype_and_its_device() -> None:
    n_seen = 0
    for path in sorted(SOURCES.rglob("*.py")):
        if path.relative_to(SOURCES).parts[0].removesuffix(".py").startswith(ELSEWHERE):
            continue
        for call in calls_in(path):
            function = call.func
            if not (isinstance(function, ast.Attribute) and ast.unparse(function.value) == "torch"):
                continue
            if function.attr in MAKERS:
                n_seen += 1
                missing = {"dtype", "device"} - {keyword.arg for keyword in call.keywords}
                missing -= {"dtype"} if function.attr in INFERRED else set()
                assert not missing, f"{path.name}:{call.lineno} {ast.unparse(call)} does not name {missing}"
    assert n_seen > 40
