"""No file tells more than it is for: neither the example of an export nor what lies in memory behind a view."""

import importlib.util
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sipp

SECRET = 12345.678  # in none of the weights


def secret(n: int, width: int) -> Tensor:
    """A few harmless rows of a data set that is private."""
    data = torch.full((1000, width), SECRET)
    data[:n] = torch.rand(n, width)
    return data[:n]


class WithViews(nn.Module):
    """Keeps pieces of the training data, as k-means, kernel methods and memory banks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 4)
        self.outer.weight = nn.Parameter(secret(4, 4))
        self.register_buffer("prototype", secret(1, 4))
        self.table = secret(1, 4)  # no part of the state_dict: a traced program keeps it all the same

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)) + self.prototype + self.table


def told(place: Path) -> bool:
    """Whether a file, a part of an archive or a file of a folder holds a private number."""
    number = torch.tensor([SECRET]).numpy().tobytes()
    parts = [path.read_bytes() for path in ([place] if place.is_file() else place.rglob("*")) if path.is_file()]
    for content in [one for one in parts if zipfile.is_zipfile(io.BytesIO(one))]:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            parts += [archive.read(name) for name in archive.namelist()]
    return any(number in part for part in parts)


WRITERS: dict[str, Callable[[nn.Module, Path], object]] = {
    "save": lambda net, path: sipp.save(net, path),
    "save int8": lambda net, path: sipp.save(net, path, values="int8"),
    "save lossless": lambda net, path: sipp.save(net, path, values="lossless"),
    "save_folder": lambda net, path: sipp.save_folder(sipp.prune(net, None, keep=0.5, method="magnitude"), path),
    "onnx": lambda net, path: sipp.export(net, path, secret(2, 8)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_lies_behind_a_view_is_not_written(name: str, tmp_path: Path) -> None:
    if name == "onnx" and importlib.util.find_spec("onnxscript") is None:
        pytest.skip("needs the extra onnx")
    torch.manual_seed(0)
    written = tmp_path / ("written.onnx" if name == "onnx" else "written")
    WRITERS[name](WithViews(), written)
    assert not told(written)


def test_the_example_itself_is_not_written_either(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    net, example = nn.Linear(8, 4), torch.full((3, 8), SECRET)
    sipp.export(net, tmp_path / "net.onnx", example)
    assert not told(tmp_path / "net.onnx") and bool((example == SECRET).all())


def test_what_torch_would_write_is_noticed(tmp_path: Path) -> None:
    torch.save(WithViews().state_dict(), tmp_path / "net.pt")
    assert told(tmp_path / "net.pt")
