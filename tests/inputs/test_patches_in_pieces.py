"""Windows are cut into pieces that fit the memory, and no smaller ones."""

import pytest
import torch
from torch import nn

from sipp.inputs.layers import find_prunable_layers
from sipp.inputs.patches import Weight, WeightUse, split_windows, start_value_range
from sipp.scoring.kernels import reference
from sipp.scoring.running import RunningWeight, _Part


def use_of(groups: int) -> tuple[WeightUse, Weight, nn.Parameter]:
    """The use of a convolution with so many groups by 8 points."""
    conv = nn.Conv2d(32, 32, 3, groups=groups, bias=False)
    (layer,) = find_prunable_layers(nn.Sequential(conv))
    (use,) = layer.adapter.uses(conv, (torch.randn(8, 32, 10, 10),), {}, 8)
    return use, next(iter(layer.weights.values())), conv.weight


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_a_grouped_convolution_is_cut_by_the_bytes_it_takes(groups: int) -> None:
    use, weight, parameter = use_of(groups)
    fan_in, n_rows = 9 * 32 // groups, 32 // groups
    n_bytes = 8 * 64 * groups * 4 * (2 * fan_in + 7 * n_rows)  # points, positions, groups, float32, as documented
    for chunk_bytes, n_pieces in ((n_bytes, 1), (n_bytes // 2, 2), (n_bytes // 8, 8)):
        running = RunningWeight(weight, parameter, reference.KERNEL, "max", chunk_bytes)
        values = start_value_range(use.windows, reference.extremes)()
        per_window = running._bytes_per_window(_Part(use, slice(0, 32), values, slice(0, 8), n_uses=1, is_wide=False))
        pieces = split_windows(use, bytes_per_window=per_window, chunk_bytes=chunk_bytes)
        assert len(list(pieces)) == n_pieces
