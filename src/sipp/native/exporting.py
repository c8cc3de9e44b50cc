"""Silences torch.export, which prints to stderr what it could not trace."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LOGS = ("torch.fx.experimental.symbolic_shapes", "torch.onnx")


@contextmanager
def quiet_export() -> Iterator[None]:
    """No warnings, no log and no printed graph while torch.export runs, which one thread does at a time.

    torch prints the graph with `print` from a private module, which gets a `print` of its own meanwhile.
    """
    try:
        names = vars(importlib.import_module("torch.export._trace"))
    except ImportError:  # another torch: its graphs are printed
        names = {}
    logs = [logging.getLogger(name) for name in LOGS]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    names["print"] = _print_nothing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels):
            log.setLevel(level)
        names.pop("print", None)


def _print_nothing(*texts: object, file: object = None) -> None:
    """In place of `print`."""
