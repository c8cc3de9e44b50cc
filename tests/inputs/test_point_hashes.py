"""Which points are the same: one hash of the bytes of all inputs of a point, whatever batch they come in."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from sipp.inputs.data import DIGITS, data_of, hash_of_points


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hashes(*batches: Any) -> list[str]:
    return data_of(list(batches)).hashes()


def test_a_hash_is_the_sha_256_of_the_bytes_of_all_inputs() -> None:
    x, y = points(3, 4), torch.arange(6).reshape(3, 2)
    by_hand = [hashlib.sha256(a.numpy().tobytes() + b.numpy().tobytes()).hexdigest()[:DIGITS] for a, b in zip(x, y)]
    assert hashes(((x, y), torch.arange(3))) == by_hand
    assert hashes({"x": x, "y": y}) == hashes({"y": y, "x": x}) == by_hand  # by name, in alphabetical order


def test_batches_and_memory_layout_do_not_matter() -> None:
    x = points(24, 3, 2, 4)
    expected = hashes(x)
    assert len(set(expected)) == 24
    for other in (x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        assert hashes(other) == expected
    assert hashes(*x.split(5)) == expected
    assert hashes(torch._neg_view(-x)) == expected
    assert hash_of_points(expected) == hash_of_points(reversed(expected)) != hash_of_points(expected[:-1])


def test_the_given_tensor_stays_resizable() -> None:
    x = points(4, 3)
    hashes(x)
    assert x.resize_(40, 3).shape == (40, 3)


def test_one_bit_another_order_or_another_type_makes_another_point() -> None:
    point = points(1, 64)
    others = [point, point.flip(1), point.roll(1, 1), torch.cat((point, torch.zeros(1, 1)), 1), point.double()]
    for place in range(64):
        changed = point.clone()
        changed.view(torch.int32)[0, place] ^= 1 << (place % 32)
        others.append(changed.nan_to_num())
    assert len({found for one in others for found in hashes(one)}) == len(others)
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        assert len(set(hashes(torch.tensor([[0, 1], [1, 1]]).to(dtype)))) == 2


def padded(lengths: list[int], to: int) -> dict[str, Tensor]:
    real = torch.arange(to) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, 50, (len(lengths), 64), generator=torch.Generator().manual_seed(0))[:, :to]
    return {"input_ids": torch.where(real, ids, 0), "attention_mask": real.long()}


def test_padding_is_not_content() -> None:
    short, long = padded([3, 5], 8), padded([3, 5], 20)
    assert hashes(short) == hashes(long) == hashes(short["input_ids"][:1, :3]) + hashes(short["input_ids"][1:, :5])
    short["input_ids"][0, 2] += 1
    assert [a == b for a, b in zip(hashes(short), hashes(long))] == [False, True]
