"""The choice of a kernel: automatic, named, impossible."""

import builtins
import logging

import pytest
import torch

from sipp.errors import OptionError
from sipp.scoring import kernels
from sipp.scoring.kernels import reference
from sipp.scoring.kernels.cpu import kernel as cpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_what_runs_on_the_cpu() -> None:
    assert kernels.pick("auto", CPU) is kernels.pick("cpu", CPU) is cpu.KERNEL
    assert kernels.pick("reference", CPU) is kernels.pick("reference", CUDA) is reference.KERNEL


@pytest.mark.parametrize(("name", "device"), [("gpu", CPU), ("cpu", CUDA), ("fast", CPU), ("gpu", torch.device("mps"))])
def test_an_impossible_choice_raises(name: str, device: torch.device) -> None:
    with pytest.raises(OptionError, match=name):
        kernels.pick(name, device)  # type: ignore[arg-type]


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = builtins.__import__

    def no_triton(name: str, *args: object) -> object:
        if name.split(".")[0] == "triton" or "gpu" in (args[2] if len(args) > 2 and args[2] else ()):
            raise ImportError("No module named 'triton'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", no_triton)
    kernels._automatic.cache_clear()
    with caplog.at_level(logging.WARNING, "sipp"):
        assert kernels.pick("auto", CUDA) is kernels.pick("auto", CUDA) is reference.KERNEL
    assert len(caplog.records) == 1 and "Triton" in caplog.text  # said once
    with pytest.raises(OptionError, match="Triton"):
        kernels.pick("gpu", CUDA)
    kernels._automatic.cache_clear()
