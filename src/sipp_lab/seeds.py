"""Derives randomness from its purpose, so that a resumed run needs no saved random state."""

from __future__ import annotations

import hashlib

import torch


def step_seed(seed: int, epoch: int, step: int) -> int:
    """The seed for everything random in one training step."""
    return _hash_of(f"step {seed} {epoch} {step}") >> 1


def prune_seed(seed: int, method: str, level: int) -> int:
    """The seed for one pruning step."""
    return _hash_of(f"prune {seed} {method} {level}") >> 1


def generator_for(purpose: str) -> torch.Generator:
    """A CPU generator that depends on this text alone."""
    return torch.Generator().manual_seed(_hash_of(purpose))


def _hash_of(purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
