"""What the command line names: networks, weights and data files, loaded without running what a file brings along."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, OptionError
from sipp.nets import NETS, build


def load_model(spec: str, weights: Path | None = None) -> nn.Module:
    """The network `spec` names, a built-in one or `package.module:callable`, in eval mode, with its weights."""
    if ":" in spec:
        module_name, _, attribute = spec.partition(":")
        try:
            model = getattr(importlib.import_module(module_name), attribute)()
        except (ImportError, AttributeError) as error:
            raise OptionError(f"{spec!r} could not be built ({error}); give package.module:callable") from error
    else:
        model = build(spec)
    if not isinstance(model, nn.Module):
        raise OptionError(f"{spec!r} gives a {type(model).__name__}, not an nn.Module; built-in are {', '.join(NETS)}")
    if weights is not None:
        _load_into(model, weights)
    return model.eval()


def load_points(path: Path) -> list[Any]:
    """The points of a file as one batch in a list: inputs, or (inputs, labels) where the file has both.

    `.npy` holds inputs; `.npz` and `.safetensors` hold `inputs` and, if they like, `labels`.
    """
    if not path.is_file():
        raise DataError(f"{path} is not a file; give .npy, .npz or .safetensors")
    try:
        if path.suffix == ".npy":
            found = {"inputs": torch.from_numpy(np.load(path, allow_pickle=False))}
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        elif path.suffix == ".safetensors":
            found = load_file(path)
        else:
            raise DataError(f"{path}: files of points end in .npy, .npz or .safetensors")
    except (ValueError, OSError, SafetensorError) as error:
        raise DataError(f"{path} could not be read: {error}") from error
    if "inputs" not in found or set(found) - {"inputs", "labels"}:
        raise DataError(f"{path} holds {sorted(found)}; expected inputs and, optionally, labels")
    return [(found["inputs"], found["labels"])] if "labels" in found else [found["inputs"]]


def _load_into(model: nn.Module, path: Path) -> None:
    """Nothing; loads a state_dict, by safetensors or by torch.load with weights_only, and never anything else."""
    if not path.is_file():
        raise OptionError(f"{path} is not a file of weights; give .safetensors or .pt")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    except Exception as error:  # a file of weights may be broken, or hostile, in any way
        raise ModelError(f"{path} could not be read as weights: {error}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ModelError(f"{path} holds no state_dict of tensors")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(f"{path} does not fit {type(model).__name__}: {error}") from error


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} could not be read: {error}") from error
