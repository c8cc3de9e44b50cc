"""Compiled code gets only addresses it can read: of the right dtype, on the CPU, without gaps unless it asks."""

import sys
from pathlib import Path

import pytest
import torch

from sipp.errors import DataError
from sipp.native import memory


def test_memory_with_gaps_is_for_code_that_knows_of_them() -> None:
    x = torch.zeros(4, 6)
    assert memory.address(x) == memory.strided_address(x) == x.data_ptr()
    assert memory.strided_address(x[:, 2:]) == x.data_ptr() + 2 * x.element_size()
    with pytest.raises(DataError, match=r"with gaps; it takes torch\.float32 on the CPU without gaps"):
        memory.address(x[:, 2:])


@pytest.mark.parametrize("take", [memory.address, memory.strided_address])
def test_another_dtype_or_device_is_refused(take: object) -> None:
    for wrong in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, device="meta")):
        with pytest.raises(DataError, match=r"it takes torch\.float32 on the CPU"):
            take(wrong)  # type: ignore[operator]


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of others gives back by itself, or not at all")
def test_what_was_freed_in_gaps_goes_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    memory.give_back_freed()
    before = resident()
    pieces = [torch.ones(24_000, dtype=torch.float32) for _ in range(2000)]  # below what goes back by itself
    full = resident()
    pieces = pieces[::20]  # between those that stay there are gaps
    memory.give_back_freed()
    assert full - before > 180e6
    assert resident() - before < 0.3 * (full - before)
