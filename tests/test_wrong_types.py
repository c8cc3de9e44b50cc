"""Every argument of every public function x mistakes that people make: it works, or the error is one of sipp's own."""

import inspect
import itertools
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.scoring import methods

TYPED = (ModelError, DataError, OptionError)
# What people pass by mistake, at any place.
MISTAKES = {
    "text": "x",
    "class in place of an instance": nn.Linear,
    "array": np.ones((6, 4), dtype=np.float32),
    "integers": torch.ones(6, 4, dtype=torch.int64),
    "half tensor": torch.ones(6, 4, dtype=torch.float16),
    "complex tensor": torch.ones(6, 4, dtype=torch.complex64),
    "sparse tensor": torch.ones(6, 4).to_sparse(),
    "meta tensor": torch.ones(6, 4, device="meta"),
}


@pytest.fixture(autouse=True)
def methods_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered here is unknown to later tests of the process."""
    monkeypatch.setattr(methods, "_ROWS", dict(methods._ROWS))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def points(n: int = 40) -> torch.Tensor:
    return torch.rand(n, 4, generator=torch.Generator().manual_seed(n))


def labelled() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(points(60), torch.arange(60) % 3)]


FOLDER = tempfile.TemporaryDirectory()  # for the file that is read


@cache
def pruned_and_saved() -> tuple[sipp.Pruned, Path]:
    """A pruned network, which no call changes, and its file."""
    pruned, file = sipp.prune(net(), None, keep=0.5, method="magnitude"), Path(FOLDER.name) / "net.sipp.safetensors"
    sipp.save(pruned, file)
    return pruned, file


def pruned() -> sipp.Pruned:
    return pruned_and_saved()[0]


def file() -> Path:
    return pruned_and_saved()[1]


def talker() -> nn.Module:
    """A model of the next of five tokens."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))


def words() -> Path:
    path = Path(FOLDER.name) / "words.txt"
    path.write_text("a short text\n")
    return path


def stack() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@cache
def stack_file() -> Path:
    folder = Path(FOLDER.name) / "stack"
    folder.mkdir()
    save_file(stack().state_dict(), folder / "model.safetensors")
    return folder


def on_disk() -> dict[str, object]:
    out = Path(tempfile.mkdtemp(dir=FOLDER.name)) / "out"
    return {
        "model": stack().to("meta"),
        "weights": stack_file(),
        "data": torch.rand(12, 3, 8, generator=torch.Generator().manual_seed(0)),
        "out": out,
        "keep": 0.5,
    }


def numbers(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(one) for one in text]}


# Arguments with which each public function works, made anew for every call.
RIGHT: dict[str, Callable[[], dict[str, object]]] = {
    "save": lambda: {"pruned": pruned(), "path": file().with_name("other"), "values": "bf16"},
    "save_folder": lambda: {"pruned": pruned(), "folder": file().with_name("folder")},
    "page": lambda: {"pruned": pruned(), "path": Path(tempfile.mkdtemp(dir=FOLDER.name)) / "page.html"},
    "load": lambda: {"path": file(), "into": net()},
    "export": lambda: {"pruned": pruned(), "path": Path(FOLDER.name) / "net.onnx", "example": points(4)},
    "inspect": lambda: {"path": file()},
    "sensitivity": lambda: {"model": net(), "data": points()},
    "prune": lambda: {"model": net(), "data": labelled(), "keep": 0.5},
    "register_method": lambda: {"name": "of-a-test", "score": lambda task: task.parameters()},
    "sample_size": lambda: {"model": net(), "example": points(1)},
    "certify": lambda: {"dense": net(), "pruned": pruned().model, "holdout": points(100)},
    "evaluate": lambda: {"dense": net(), "pruned": pruned().model, "data": labelled()},
    "bench": lambda: {"pruned": pruned(), "example": points(4)},
    "methods": dict,
    "certify_accuracy": lambda: {"dense": net(), "pruned": pruned().model, "holdout": labelled()},
    "prune_to": lambda: {
        "model": net(),
        "data": points(),
        "holdout": points(100),
        "epsilon": 0.5,
        "method": "magnitude",
    },
    "compare": lambda: {"model": net(), "data": labelled(), "keeps": (0.5,), "methods": ("magnitude",)},
    "check_assumption": lambda: {"model": net(), "data": points(2)},
    "assess": lambda: {"dense": net(), "pruned": pruned().masks, "data": points()},
    "hold": lambda: {"model": net(), "pruned": pruned()},
    "release": lambda: {"model": net()},
    "shrink": lambda: {"model": net(), "data": points(4)},
    "sparse": lambda: {"model": net(), "example": points(4)},
    "gradual": lambda: {"model": net(), "train_step": lambda step: None, "data": labelled(), "keep": 0.5, "steps": 2},
    "text": lambda: {"files": words(), "tokenizer": numbers, "length": 4},
    "perplexity": lambda: {"model": talker(), "data": torch.arange(24).reshape(4, 6) % 5, "dense": talker()},
    "prune_on_disk": on_disk,
    "repair": lambda: {"model": net(), "pruned": pruned(), "data": points()},
}
FUNCTIONS = sorted(name for name in sipp.__all__ if inspect.isfunction(getattr(sipp, name)))


def cases() -> list[tuple[str, str]]:
    return [(f, p) for f in FUNCTIONS for p in inspect.signature(getattr(sipp, f)).parameters]


def test_every_public_function_is_covered() -> None:
    assert set(RIGHT) == set(FUNCTIONS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("function", "parameter"), cases())
def test_a_mistake_is_an_error_of_ours(
    function: str, parameter: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # text may be taken for the name of a file
    failures = []
    for name, value in MISTAKES.items():
        call, arguments = getattr(sipp, function), RIGHT[function]()
        if inspect.signature(call).parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL:
            call = partial(call, arguments.pop(next(iter(arguments))), value)
        else:
            arguments[parameter] = value
        try:
            call(**arguments)
        except TYPED:
            pass
        except Exception as error:
            failures.append(f"{parameter} = {name}: {type(error).__name__}: {str(error)[:90]!r}")
    assert not failures, "\n".join(failures)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("weights", "values"),
    list(itertools.permutations([torch.float16, torch.bfloat16, torch.float32, torch.float64], 2)),
)
def test_points_in_another_precision_than_the_weights(weights: torch.dtype, values: torch.dtype) -> None:
    with pytest.raises(DataError, match=str(values).removeprefix("torch.")):
        sipp.prune(net().to(weights), points().to(values), keep=0.5)
