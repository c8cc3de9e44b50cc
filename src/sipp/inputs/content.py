"""A short key of the numbers of each point, computed on the device where they lie, in one reading.

With r a row of random 64-bit numbers, two different rows of 32-bit words x, y have sum_k r_k x_k = sum_k r_k y_k
modulo 2^64 with a probability of at most 2^-33: words differ by an odd number times a power of two below 2^32. A key is
two such sums: 2^-66 for one pair, 2^-40 that any two of 10,000 points are mixed up. Sums of integers are exact in every
order, so a key depends on nothing but the numbers. The random rows are the same everywhere, so this is no defence
against someone who makes up points to deceive: files and certificates are told apart by SHA-256.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

N_SUMS = 2
CHUNK_VALUES = 1 << 17  # read at once, so that what is computed of them stays in a CPU's cache
GPU_CHUNK_VALUES = 1 << 25


def content_keys(part: Tensor | list[Tensor]) -> list[bytes]:
    """One key per point, of how many numbers it holds and of these as float32; -0 and 0 are one number."""
    if not isinstance(part, Tensor):  # of unequal lengths
        return [key for point in part for key in content_keys(point[None])]
    rows_BN = part.detach().reshape(len(part), -1)
    n_values = rows_BN.shape[1]
    most = CHUNK_VALUES if part.device.type == "cpu" else GPU_CHUNK_VALUES
    sums_B2 = torch.cat([_sums(rows_CN) for rows_CN in rows_BN.split(max(1, most // max(1, n_values)))]).cpu()
    head, raw, width = n_values.to_bytes(8, "little"), sums_B2.numpy().tobytes(), N_SUMS * 8
    return [head + raw[start : start + width] for start in range(0, len(raw), width)]


def _sums(rows_CN: Tensor) -> Tensor:
    words = (rows_CN.to(torch.float32) + 0.0).contiguous().view(torch.int32).to(torch.int64)
    factors = _factors(rows_CN.shape[1], rows_CN.device)
    return torch.stack([(words * row).sum(1) for row in factors], dim=1)


@lru_cache(maxsize=8)
def _factors(n_values: int, device: torch.device) -> Tensor:
    """The random rows, N_SUMS x N; those of fewer values begin alike."""
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (n_values, N_SUMS)
    limits = torch.iinfo(torch.int64)
    drawn = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int64, device="cpu")
    return drawn.t().contiguous().to(device)
