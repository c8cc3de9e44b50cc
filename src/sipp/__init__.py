"""Provable, data-informed weight pruning for PyTorch."""

from sipp.sensitivity import sensitivity

__version__ = "0.1.0"
__all__ = ["sensitivity"]
