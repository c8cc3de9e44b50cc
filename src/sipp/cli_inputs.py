"""The networks that the command line names, and their weights, loaded without running what a file brings along."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sipp.cli_errors import Trouble, at
from sipp.errors import DataError, ModelError, OptionError
from sipp.nets import NETS, build

WEIGHTS_NAME = "model.safetensors"  # what `sipp prune --out DIR` calls the network
HOLDERS = ("state_dict", "model_state_dict", "model")  # keys under which checkpoints keep it
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and torch.compile
MOST_NAMES = 4
DEVICES = ("auto", "cpu", "cuda")


def load_model(
    spec: str, weights: Path | None = None, *, option: str = "--weights", seed: int = 0, device: str = "cpu"
) -> nn.Module:
    """The network `spec` names, a built-in one or `package.module:callable`, in eval mode, with its weights.

    Without weights it is freshly initialised, with torch's global generator at `seed`.
    """
    torch.manual_seed(seed)
    with at(f"--model {spec}", f"give package.module:callable, or one of {', '.join(NETS)}"):
        model = _build_own(spec) if ":" in spec else build(spec)
    if weights is not None:
        with at(f"{option} {weights}", "give the weights that were saved from this very network"):
            _load_into(model, weights_file(weights))
    return model.to(find_device(device)).eval()


def weights_file(path: Path) -> Path:
    """The file of weights that `path` means: itself, or the network in a folder of `sipp prune --out`."""
    found = path / WEIGHTS_NAME if path.is_dir() else path
    if not found.is_file():
        raise OptionError(f"{found} is not a file of weights; give .safetensors or .pt")
    return found


def find_device(name: str) -> torch.device:
    """The device; "auto" is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise Trouble(
            "torch finds no CUDA device on this machine", "--device cuda", "use --device cpu, or leave it out"
        )
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _build_own(spec: str) -> nn.Module:
    """The network that a callable of the user's own code gives. Their folder comes first, as for `python -m`."""
    module_name, _, attribute = spec.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            made = getattr(made, part)
        model = made if isinstance(made, nn.Module) else made()
    except Exception as error:  # it is their code: it may raise anything
        raise OptionError(
            f"{spec!r} could not be built ({type(error).__name__}: {error}); give package.module:callable, "
            "which is called without arguments"
        ) from error
    if not isinstance(model, nn.Module):
        raise OptionError(f"{spec!r} gives a {type(model).__name__}, not an nn.Module")
    return model


def _load_into(model: nn.Module, path: Path) -> None:
    """Nothing; loads a state_dict, by safetensors or by torch.load with weights_only, and never anything else."""
    try:
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # a file of weights may be broken, or hostile, in any way
        reason = str(error).split("\n")[0]  # torch goes on with advice on how to run what the file brings along
        raise ModelError(
            f"{path} could not be read as weights ({type(error).__name__}: {reason}); give a whole .safetensors, or a "
            ".pt of tensors only: nothing else in a file is run"
        ) from error
    state = _state_of(content)
    if state is None:
        raise ModelError(f"{path} holds no state_dict of tensors; give the file of torch.save(model.state_dict(), ...)")
    _check_names(model, state, path)
    model.load_state_dict(state, strict=False)  # what may be missing was checked: a tied name only


def _state_of(content: Any) -> dict[str, Tensor] | None:
    """The tensors by name, without wrappers' prefixes, or None."""
    for holder in HOLDERS:
        if isinstance(content, dict) and isinstance(content.get(holder), dict):
            content = content[holder]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        return None
    for prefix in PREFIXES:
        if all(str(name).startswith(prefix) for name in content):
            content = {str(name)[len(prefix) :]: value for name, value in content.items()}
    return content


def _check_names(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Nothing; ModelError that lists what differs between the file and the network, before anything is copied."""
    own = model.state_dict()
    by_tensor: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), set()).add(name)
    tied = {name: names for names in by_tensor.values() for name in names if len(names) > 1}
    missing = [n for n in own if n not in state and not any(other in state for other in tied.get(n, ()))]
    unknown = [name for name in state if name not in own]
    wrong = [
        f"{name} ({_shape(value)} in the file, {_shape(own[name])} in the network)"
        for name, value in state.items()
        if name in own and isinstance(own[name], Tensor) and value.shape != own[name].shape
    ]
    differences = [
        f"{words}: {', '.join(names[:MOST_NAMES])}"
        + (f" and {len(names) - MOST_NAMES} more" if names[MOST_NAMES:] else "")
        for words, names in (("not in the file", missing), ("not in the network", unknown), ("other shape", wrong))
        if names
    ]
    if differences:
        raise ModelError(f"{path} does not fit {type(model).__name__}, {'; '.join(differences)}")


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} could not be read ({error}); give a certificate that `sipp certify --out` wrote"
        ) from error
