"""Products in float32 are float32, whatever the caller prefers elsewhere."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from sipp.results import numerics


def test_float32_products_are_exact_and_the_setting_comes_back() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        half = torch.zeros(2, dtype=torch.bfloat16)  # on a CPU half precision is no case
        for operands in ((), (torch.zeros(2),), (half,), (half, torch.zeros(2))):
            with numerics.exact_matmul(*operands):
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == "medium"
        with numerics.exact_matmul(allow_tf32=True):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")
def test_settings_of_single_backends_come_back() -> None:
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = cuda.fp32_precision, cpu.fp32_precision
    try:
        cuda.fp32_precision, cpu.fp32_precision = "tf32", "bf16"
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        with numerics.exact_matmul():
            assert (cuda.fp32_precision, cpu.fp32_precision) == ("ieee", "ieee")
        assert (cuda.fp32_precision, cpu.fp32_precision) == ("tf32", "bf16")
        with numerics.exact_matmul(), numerics.exact_matmul(allow_tf32=True):
            assert cuda.fp32_precision == "tf32"
        assert (cuda.fp32_precision, cpu.fp32_precision) == ("tf32", "bf16")
    finally:
        torch.set_float32_matmul_precision("highest")
        cuda.fp32_precision, cpu.fp32_precision = before


class OnGpu:
    """What a tensor on a GPU says of itself."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def test_products_of_half_precision_on_a_gpu_may_use_tf32() -> None:
    half, whole = OnGpu(torch.bfloat16), OnGpu(torch.float32)
    for operands, precision in (((half, half), "high"), ((half, whole), "highest"), ((whole,), "highest")):
        with numerics.exact_matmul(*operands):  # type: ignore[arg-type]
            assert torch.get_float32_matmul_precision() == precision


def test_the_gpu_of_a_model_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device) or nullcontext())
    monkeypatch.setattr(numerics, "device_of", lambda model: torch.device("cuda", 1))
    with numerics.current_device(nn.Linear(2, 2)):
        assert current == [torch.device("cuda", 1)]
    monkeypatch.undo()
    with numerics.current_device(nn.Linear(2, 2)):  # on a CPU there is nothing to do
        pass
