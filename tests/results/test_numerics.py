"""Products in float32 are float32, whatever the caller prefers elsewhere."""

import pytest
import torch

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
