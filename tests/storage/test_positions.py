"""Positions of kept weights: a slow, obvious reading of the same bytes, and the entropy bound."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from sipp.results.saved_file import entropy_bytes
from sipp.storage.coding import decode_positions, encode_positions


def draw(n_weights: int, keep: float, seed: int) -> NDArray[np.bool_]:
    return np.random.default_rng(seed).random(n_weights) < keep


def slowly(kind: str, code: bytes, n_weights: int) -> list[bool]:
    """The flags, weight by weight, as the docstring of coding.py says them."""
    if kind == "all":
        return [True] * n_weights
    if kind == "bitmask":
        return [bool(code[i // 8] >> (i % 8) & 1) for i in range(n_weights)]
    rare: list[bool] = []
    for symbol in zlib.decompressobj(-15).decompress(code):
        rare += [False] * symbol
        if symbol != 255:
            rare.append(True)
    assert rare.pop() is True and len(rare) == n_weights
    return rare if kind == "kept gaps" else [not flag for flag in rare]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 0.999, 1.0]), st.integers(0, 99))
def test_round_trip_and_the_slow_reading_agree(n_weights: int, keep: float, seed: int) -> None:
    flags = draw(n_weights, keep, seed)
    kind, code = encode_positions(flags)
    assert slowly(kind, code, n_weights) == flags.tolist()
    back = decode_positions(kind, memoryview(code), n_weights)
    assert np.array_equal(back, flags) and back.dtype == np.bool_
    assert len(code) <= math.ceil(n_weights / 8)


@pytest.mark.parametrize("keep", [0.5, 0.4, 0.382, 0.35, 0.3, 0.2, 0.1, 0.05, 0.02, 0.9])
def test_positions_are_close_to_the_entropy_also_where_all_rows_are_alike(keep: float) -> None:
    flags = draw(400_000, keep, 0)
    _, code = encode_positions(flags)
    assert len(code) <= 1.05 * entropy_bytes(flags.size, int(flags.sum()))
    kept_bytes = int(flags.sum())  # the cheapest values there are: int8
    assert len(code) + kept_bytes <= 1.03 * (entropy_bytes(flags.size, kept_bytes) + kept_bytes)


def test_each_encoding_is_used_where_it_is_smallest() -> None:
    kinds = [encode_positions(draw(10_000, keep, 0))[0] for keep in (1.0, 0.1, 0.9)]
    assert kinds == ["all", "kept gaps", "zero gaps"]
    assert encode_positions(draw(40, 0.5, 0))[0] == "bitmask"


def deflated(symbols: bytes) -> memoryview:
    return memoryview(zlib.compress(symbols, wbits=-15))


def test_a_valid_encoding_is_decoded() -> None:
    flags = decode_positions("kept gaps", deflated(bytes([3, 5])), 9)
    assert flags.tolist() == [i == 3 for i in range(9)]
