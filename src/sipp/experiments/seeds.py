"""Derives seeds from their purpose, so that a resumed run needs no saved random state."""

from __future__ import annotations

import hashlib


def step_seed(seed: int, epoch: int, step: int) -> int:
    """The seed for everything random in one training step."""
    return _seed_of(f"step {seed} {epoch} {step}")


def prune_seed(seed: int, method: str, level: int) -> int:
    """The seed for one pruning step."""
    return _seed_of(f"prune {seed} {method} {level}")


def _seed_of(purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big") >> 1
