"""A small file without sipp: the program that `sipp export --to reader` writes reads every file, bit by bit."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.cli.errors import run_and_report
from sipp.cli.main import app
from sipp.errors import DataError
from sipp.records.options import Precision
from sipp.runtime.exporting import export_reader
from sipp.storage import standalone_reader


class Odd(nn.Module):
    """Tensors of every kind: tied, sparse, dense, of other dtypes, without axes, without numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.thin, self.thick = nn.Linear(40, 30), nn.Linear(30, 20)
        self.brain = nn.Linear(50, 60, dtype=torch.bfloat16)
        self.wide = nn.Linear(6, 5, dtype=torch.float64)
        self.tied = self.thin
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("wave", torch.rand(3, dtype=torch.complex64))
        self.register_buffer("eight", torch.rand(5).to(torch.float8_e4m3fn))
        with torch.no_grad():
            self.thin.weight.masked_fill_(torch.rand(30, 40) > 0.05, 0)  # gaps between kept ones
            self.thick.weight.masked_fill_(torch.rand(20, 30) > 0.5, 0)  # a bitmask
            self.brain.weight.masked_fill_(torch.rand(60, 50) > 0.97, 0)  # gaps between zeros
            self.wide.weight[0, :3] = torch.tensor([0.0, -0.0, 1e-300])


def as_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.float().numpy()
    return (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy()


@pytest.mark.parametrize("values", ["fp32", "lossless", "fp16", "bf16", "int8"])
def test_every_bit_of_every_kind_of_tensor(values: Precision, tmp_path: Path) -> None:
    contents = sipp.save(Odd(), tmp_path / "net.safetensors", values=values)
    assert {one.positions for one in contents.tensors} == {"all", "bitmask", "kept gaps", "zero gaps"}
    found, expected = standalone_reader.read(str(tmp_path / "net.safetensors")), sipp.load(tmp_path / "net.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = as_numpy(tensor)
        assert found[name].shape == wanted.shape and found[name].dtype == wanted.dtype, name
        assert found[name].tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("keep", [0.9, 0.003])
def test_a_pruned_network_with_masks_of_its_own(keep: float, tmp_path: Path) -> None:
    pruned = sipp.prune(nn.Linear(300, 40), None, keep=keep, method="random")
    with torch.no_grad():
        pruned.model.get_parameter("weight")[~pruned.masks["weight"]] *= -1  # -0.0, which is stored
    sipp.save(pruned, tmp_path / "net.safetensors")
    found = standalone_reader.read(str(tmp_path / "net.safetensors"))
    assert found["weight"].tobytes() == pruned.model.get_parameter("weight").detach().numpy().tobytes()
    assert found["bias"].tobytes() == pruned.model.get_parameter("bias").detach().numpy().tobytes()


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    """Half-way cases go to the even neighbour."""
    numbers = torch.cat(
        [torch.randn(1000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 0.0])]
    )
    expected = numbers.to(torch.bfloat16).float().numpy()
    assert np.array_equal(standalone_reader._rounded_to_bfloat16(numbers.numpy()), expected)


def test_it_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a script, with nothing of ours or of torch to import, after the command that writes it."""
    net, file, script = Odd(), tmp_path / "small.safetensors", tmp_path / "read_small.py"
    sipp.save(net, file)
    assert run_and_report(app, ["export", str(file), "--to", "reader", "--out", str(script)]) == 0
    assert "every bit is the same" in " ".join(capsys.readouterr().out.split())
    words = ["x", str(file), str(tmp_path / "out.npz")]
    alone = f"import sys, runpy; sys.modules.update(torch=None, sipp=None, safetensors=None); sys.argv = {words!r}; "
    run = alone + f"runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "thin.weight: float32 (30, 40)" in done.stdout
    with np.load(tmp_path / "out.npz") as arrays:
        assert np.array_equal(arrays["thin.weight"], net.thin.weight.detach().numpy())


def test_it_imports_nothing_but_numpy() -> None:
    tree = ast.parse(Path(standalone_reader.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) == {"numpy"}


def test_damage_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.safetensors"
    sipp.save(nn.Linear(8, 4), file)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        standalone_reader.read(str(file))
    with pytest.raises(DataError):
        export_reader(file, tmp_path / "reader.py")
    file.write_bytes(b"no such file at all")
    with pytest.raises(ValueError, match=r"not a file from sipp\.save"):
        standalone_reader.read(str(file))
    words = ["export", str(file), "--to", "reader", "--out", str(tmp_path / "reader.py")]
    assert run_and_report(app, words) == 2 and run_and_report(app, [*words, "--model", "digits-cnn"]) == 2
    assert "leave it out" in capsys.readouterr().err and not (tmp_path / "reader.py").exists()
