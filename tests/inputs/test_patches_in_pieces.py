"""Windows are cut into pieces that fit the memory, and no smaller ones."""

import pytest
import torch
from torch import nn

from sipp.inputs.layers import find_prunable_layers
from sipp.inputs.patches import WeightUse, split_windows
from sipp.scoring.kernels.protocol import bytes_per_window


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_a_grouped_convolution_is_cut_by_the_bytes_it_takes(groups: int) -> None:
    conv = nn.Conv2d(32, 32, 3, groups=groups, bias=False)
    (layer,) = find_prunable_layers(nn.Sequential(conv))
    use: WeightUse
    (use,) = layer.adapter.uses(conv, (torch.randn(8, 32, 10, 10),), {}, 8)
    fan_in, n_rows = 9 * 32 // groups, 32 // groups
    n_bytes = 8 * 64 * groups * 4 * (2 * fan_in + 7 * n_rows)  # points, positions, groups, float32, as documented
    for chunk_bytes, n_pieces in ((n_bytes, 1), (n_bytes // 2, 2), (n_bytes // 8, 8)):
        per_window = bytes_per_window(torch.zeros(groups, n_rows, fan_in))
        pieces = split_windows(use, bytes_per_window=per_window, chunk_bytes=chunk_bytes)
        assert len(list(pieces)) == n_pieces
