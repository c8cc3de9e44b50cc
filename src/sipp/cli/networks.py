"""Loads the network of --model and the weights of --weights, without executing code from files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.hugging_face import PREFIX, hf_model
from sipp.cli.options import Device
from sipp.errors import ModelError, OptionError
from sipp.files import WEIGHTS_NAME, metadata_of
from sipp.results import NormStats, words
from sipp_lab.nets import NETS, build, n_classes_in
from sipp_lab.own_code import import_named, user_code
from sipp_lab.runs.context import device_named

INDEX = f"{WEIGHTS_NAME}.index.json"  # of weights in several files
WAYS = f"my.py:function, package.module:function, hf:DIR, or one of {', '.join(NETS)}"
HOLDERS = ("state_dict", "model_state_dict", "model")  # keys under which checkpoints store the state_dict
PREFIXES = ("model.", "module.", "_orig_mod.")  # from runs, DistributedDataParallel and torch.compile
MASKS = "mask."  # prefix of masks in the files of runs
SMALL_FILE = {"index", "data"}  # tensors in a file from `sipp.save`


def load_model(
    spec: str, weights: Path | None = None, *, option: str = "--weights", seed: int = 0, device: Device = "cpu"
) -> nn.Module:
    """Loads a built-in network, `hf:DIR` or the user's own, in eval mode.

    Without weights it is freshly initialised, from torch's global generator with `seed`. The number of classes of a
    built-in network comes from its weights.
    """
    torch.manual_seed(seed)
    with naming_option(f"--model {spec}", WAYS):
        model = _build(spec)
    if weights is not None:
        with naming_option(f"{option} {weights}", "give the weights that were saved from this very network"):
            file = weights_file(weights)
            state = _state_of(_read(file), set(model.state_dict()))
            if state is None:
                raise ModelError(
                    f"{file} contains no state_dict", fix="give the file of torch.save(model.state_dict(), ...)"
                )
            if spec in NETS:
                n_stored = n_classes_in(spec, {name: value.shape for name, value in state.items()})
                model = model if n_stored in (None, NETS[spec].n_classes) else build(spec, n_classes=n_stored)
            _load_into(model, state, file)
    return model.to(device_of(device)).eval()


def device_of(device: Device) -> torch.device:
    """The device of --device."""
    with naming_option(f"--device {device}", "use --device cpu, or leave it out"):
        return device_named(device)


def both_networks(spec: str, dense: Path | None, pruned: Path, device: Device) -> tuple[nn.Module, nn.Module]:
    """Loads the dense and the pruned network; a Hugging Face folder has the dense weights itself."""
    if dense is None and not spec.startswith(PREFIX):
        raise CommandError("no weights given for the dense network", where=f"--model {spec}", fix="give --dense FILE")
    first = load_model(spec, dense, option="--dense", device=device)
    return first, load_model(spec, pruned, option="--pruned", device=device)


def norm_stats_of(model: nn.Module, asked: NormStats | None = None) -> tuple[NormStats, list[str]]:
    """The BatchNorm statistics to score with, and a line to print if the command chose them itself.

    By default they are those of each batch if no layer has statistics of its own.
    """
    own = [(module.running_mean, module.running_var) for module in model.modules() if isinstance(module, _BatchNorm)]
    is_new = [
        mean is not None and var is not None and not mean.any() and torch.equal(var, torch.ones_like(var))
        for mean, var in own
    ]
    if asked is not None or not is_new or not all(is_new):
        return asked or "running", []
    why = "uses the statistics of each batch: it has none of its own, the network is untrained"
    return "batch", [words.labelled_line("batchnorm", why)]


# --- the network ------------------------------------------------------------------------------------------------------


def _build(spec: str) -> nn.Module:
    """A built-in network, that of `hf:DIR`, or the result of the user's own function."""
    if spec.startswith(PREFIX):
        return hf_model(spec)
    file, _, function = spec.partition(":")
    path = Path(file)
    if path.suffix == ".py" and not function:
        raise OptionError(
            f"{spec} is a file of code", fix=f"name the function that builds the network, {spec}:FUNCTION"
        )
    if path.suffix in (".pt", ".pth", ".safetensors"):
        raise OptionError(
            f"{spec} contains weights, not the code that builds the network",
            fix=f"give it as --weights, and {WAYS} as --model",
        )
    if not function:
        return build(spec)
    if path.suffix == ".py":  # MODULE:FUNCTION, as seen from the current folder
        if path.is_absolute() or ".." in path.parts:
            raise OptionError(
                f"{file} is not in the current folder", fix=f"start in its folder, and give {path.name}:{function}"
            )
        spec = f"{'.'.join(path.with_suffix('').parts)}:{function}"
    with user_code(spec, "a network"):
        named = import_named(spec)
        model = named if isinstance(named, nn.Module) else named()
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"{spec!r} returned a {type(model).__name__}, not an nn.Module",
            fix="give a callable that returns a network",
        )
    return model


# --- its weights ------------------------------------------------------------------------------------------------------


def weights_file(path: Path) -> Path:
    """The weight file at `path`: itself, or the file (or index of several) in a folder."""
    file = path / WEIGHTS_NAME if path.is_dir() else path
    file = path / INDEX if path.is_dir() and not file.exists() and (path / INDEX).exists() else file
    if not file.is_file():
        raise OptionError(f"{file} does not exist", fix="check the name, and the folder you are in")
    return file


def _read(path: Path) -> Any:
    """Reads a weight file, with safetensors or torch.load(weights_only=True), never any other way."""
    try:
        if path.name == INDEX:
            files = sorted({str(name) for name in json.loads(path.read_text())["weight_map"].values()})
            return {name: tensor for file in files for name, tensor in load_file(path.parent / file).items()}
        is_safetensors = path.suffix == ".safetensors" or bool(metadata_of(path))
        content = load_file(path) if is_safetensors else torch.load(path, "cpu", weights_only=True)
        return sipp.load(path) if is_safetensors and content.keys() == SMALL_FILE else content
    except Exception as error:  # a broken file may raise anything
        reason = f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ")
        fix = "give an intact .safetensors, or a .pt of tensors only"
        if isinstance(error, pickle.UnpicklingError):  # torch's advice is to execute its content
            reason = "it is truncated, or contains more than tensors"
            if "Unsupported global" in str(error):
                fix = (
                    "sipp runs no code from files. Measure a network from sipp.shrink in Python: sipp.evaluate(dense, "
                )
                fix += f"torch.load('{path}', weights_only=False), data). Of any other, write the weights: "
                fix += "torch.save(model.state_dict(), ...)"
        raise ModelError(f"{path} could not be read as weights ({reason})", fix=fix) from error


def _load_into(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Loads tensors into the network; ModelError if they do not match it."""
    try:
        missing, unknown = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # it lists all shape mismatches
        raise ModelError(f"{path} does not fit {type(model).__name__}, {' '.join(str(error).split())}") from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name in state}
    missing = [name for name in missing if id(parameters.get(name)) not in loaded]  # unless tied
    differences = [f"not in the file: {words.listed(missing)}"] if missing else []
    differences += [f"not in the network: {words.listed(unknown)}"] if unknown else []
    if differences:
        raise ModelError(f"{path} does not fit {type(model).__name__}, {'; '.join(differences)}")


def _state_of(content: Any, known: set[str]) -> dict[str, Tensor] | None:
    """The state_dict in a checkpoint, without prefixes of wrappers; None if there is none."""
    for holder in HOLDERS:
        if isinstance(content, dict) and isinstance(content.get(holder), dict):
            content = content[holder]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        return None
    state = _without_torch_masks({str(name): value for name, value in content.items()}, known)
    if not known.intersection(state):
        state = {name: value for name, value in state.items() if not name.startswith(MASKS)}
    for prefix in PREFIXES:
        if not known.intersection(state) and all(name.startswith(prefix) for name in state):
            state = _without_torch_masks({name.removeprefix(prefix): value for name, value in state.items()}, known)
    return state


def _without_torch_masks(state: dict[str, Tensor], known: set[str]) -> dict[str, Tensor]:
    """Applies masks of torch.nn.utils.prune: NAME_orig and NAME_mask become NAME."""
    state = dict(state)
    for name in known - state.keys():
        if {f"{name}_orig", f"{name}_mask"} <= state.keys():
            mask = state.pop(f"{name}_mask")
            state[name] = (state.pop(f"{name}_orig") * mask).masked_fill(mask == 0, 0.0)
    return state
