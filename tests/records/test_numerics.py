"""Products in float32 are float32, whatever the caller prefers elsewhere."""

import torch

from sipp.records.numerics import exact_matmul


def test_float32_products_are_exact_and_the_setting_comes_back() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        half = torch.zeros(2, dtype=torch.bfloat16)  # on a CPU half precision is no case
        for operands in ((), (torch.zeros(2),), (half,), (half, torch.zeros(2))):
            with exact_matmul(*operands):
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == "medium"
        with exact_matmul(allow_tf32=True):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
