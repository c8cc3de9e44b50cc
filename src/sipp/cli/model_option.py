"""Loads the network of --model and the weights of --weights, without executing code from files."""

from __future__ import annotations

import json
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.hugging_face_models import PREFIX, hf_model
from sipp.errors import DataError, ModelError, OptionError
from sipp.files import WEIGHTS_NAME, metadata_of
from sipp.results import NormStats, Report, SeenPoints, words
from sipp_lab.nets import NETS, build, n_classes_in
from sipp_lab.own_code import call_user_code, import_named
from sipp_lab.training.setup import Device, device_named

INDEX = f"{WEIGHTS_NAME}.index.json"  # of weights in several files
WAYS = f"my.py:function, package.module:function, hf:DIR, or one of {', '.join(NETS)}"
HOLDERS = ("state_dict", "model_state_dict", "model")  # keys under which checkpoints store the state_dict
PREFIXES = ("model.", "module.", "_orig_mod.")  # from runs, DistributedDataParallel and torch.compile
MASKS = "mask."  # prefix of masks in the files of runs
COUNTER = ".num_batches_tracked"  # of BatchNorm; missing in old checkpoints, not needed for evaluation
SMALL_FILE = {"index", "data"}  # tensors in a file from `sipp.save`


def load_model(
    spec: str,
    weights: Path | None = None,
    *,
    option: str = "--weights",
    seed: int = 0,
    device: Device = "cpu",
) -> nn.Module:
    """Loads a built-in network, `hf:DIR` or the user's own, in eval mode.

    Without weights it is freshly initialised, from torch's global generator with `seed`. The number of classes of a
    built-in network comes from its weights.
    """
    torch.manual_seed(seed)
    content = None
    of_weights = f"{option} {weights}", "give the weights that were saved from this very network"
    if weights is not None:
        with naming_option(*of_weights):
            content = _read(weights_file(weights))
    with naming_option(f"--model {spec}", WAYS):
        model = _build(spec)
        state = None if content is None else _state_of(content, set(model.state_dict()))
        if spec in NETS and state is not None:
            n_stored = n_classes_in(spec, {name: value.shape for name, value in state.items()})
            model = model if n_stored in (None, NETS[spec].n_classes) else build(spec, n_classes=n_stored)
    if weights is not None:
        with naming_option(*of_weights):
            _load_into(model, state, weights_file(weights))
    tensors = chain(model.named_parameters(), model.named_buffers())
    lost = next((name for name, tensor in tensors if tensor.is_meta), None)
    if lost is not None:
        raise CommandError(
            f"{lost} is on the meta device: it has a shape but no values",
            where=f"--model {spec}",
            fix="give a callable that builds the network on the CPU, with its values",
        )
    with naming_option(f"--device {device}", "use --device cpu, or leave it out"):
        return model.to(device_named(device)).eval()


def norm_stats_of(model: nn.Module, asked: NormStats | None) -> NormStats:
    """The statistics of BatchNorm to score with: as asked; by default those of each batch if no layer has its own."""
    if asked is not None:
        return asked
    own = [(module.running_mean, module.running_var) for module in model.modules() if isinstance(module, _BatchNorm)]
    is_new = [
        mean is not None and var is not None and not mean.any() and torch.equal(var, torch.ones_like(var))
        for mean, var in own
    ]
    return "batch" if is_new and all(is_new) else "running"


def norm_stats_lines(used: NormStats, asked: NormStats | None) -> list[str]:
    """What a command says if it chose the statistics itself because the network is untrained."""
    if asked is not None or used == "running":
        return []
    return [
        words.labelled_line(
            "batchnorm", "uses the statistics of each batch: it has none of its own, the network is untrained"
        )
    ]


def both_networks(spec: str, dense: Path | None, pruned: Path, device: Device) -> tuple[nn.Module, nn.Module]:
    """Loads the dense and the pruned network; a Hugging Face folder holds the dense weights itself."""
    if dense is None and not spec.startswith(PREFIX):
        raise CommandError(
            "the dense network's weights are not known", where=f"--model {spec}", fix="give --dense FILE"
        )
    first = load_model(spec, dense, option="--dense", device=device)
    return first, load_model(spec, pruned, option="--pruned", device=device)


def points_seen_by(pruned: Path) -> SeenPoints:
    """The hashes of the inputs that chose a network, from its folder, named itself or by its file of weights."""
    folder = pruned.parent if pruned.name == WEIGHTS_NAME else pruned
    try:
        report = sipp.inspect(folder) if folder.is_dir() else None
    except DataError:  # a folder of another program, or weights that do not match the record
        report = None
    if not isinstance(report, Report):
        return SeenPoints(frozenset(), is_all=False)
    return SeenPoints(report.pruned.seen, report.pruned.seen_all and bool(report.pruned.seen))


def _build(spec: str) -> nn.Module:
    """A built-in network, that of `hf:DIR`, or the result of the user's own function."""
    if spec.startswith(PREFIX):
        return hf_model(spec)
    if Path(spec).suffix == ".py":
        raise OptionError(
            f"{spec} is a file of code", fix=f"name the function that builds the network, {spec}:FUNCTION"
        )
    if Path(spec).suffix in (".pt", ".pth", ".safetensors"):
        raise OptionError(
            f"{spec} holds weights, not how the network is built", fix=f"give it as --weights, and {WAYS} as --model"
        )
    return _build_by_user_code(spec) if ":" in spec else build(spec)


def module_spec(spec: str) -> str:
    """FILE.py:FUNCTION as MODULE:FUNCTION, as seen from the current folder; anything else as it is."""
    file, _, function = spec.partition(":")
    if not file.endswith(".py"):
        return spec
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if path.is_absolute() or ".." in path.parts:
        raise OptionError(
            f"{file} is not in the current folder", fix=f"start in its folder, and give {path.name}:{function}"
        )
    return f"{'.'.join(path.with_suffix('').parts)}:{function}"


def weights_file(path: Path) -> Path:
    """The weight file at `path`: itself, or the file (or index of several) in a folder."""
    file = path / WEIGHTS_NAME if path.is_dir() else path
    file = path / INDEX if path.is_dir() and not file.exists() and (path / INDEX).exists() else file
    if not file.exists():
        raise OptionError(f"{file} does not exist", fix="check the name, and the folder you are in")
    if not file.is_file():
        raise OptionError(f"{file} is not a file of weights", fix="give .safetensors or .pt")
    return file


def _build_by_user_code(spec: str) -> nn.Module:
    """The network that the user's own code returns, or names directly."""
    spec = module_spec(spec)
    named = call_user_code(spec, "network", lambda: import_named(spec))
    model = named if isinstance(named, nn.Module) else call_user_code(spec, "network", named)
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"{spec!r} gives a {type(model).__name__}, not an nn.Module", fix="give a callable that returns a network"
        )
    return model


def _read(path: Path) -> Any:
    """Reads a weight file, with safetensors or torch.load(weights_only=True), never any other way."""
    try:
        if path.name == INDEX:
            files = sorted({str(name) for name in json.loads(path.read_text())["weight_map"].values()})
            return {name: tensor for file in files for name, tensor in load_file(path.parent / file).items()}
        is_safetensors = path.suffix == ".safetensors" or bool(metadata_of(path))
        content = load_file(path) if is_safetensors else torch.load(path, "cpu", weights_only=True)
        if is_safetensors and content.keys() == SMALL_FILE:
            content = sipp.load(path)
        return content
    except Exception as error:  # a broken or hostile file may raise anything
        is_module = isinstance(error, pickle.UnpicklingError) and "Unsupported global" in str(error)
        raise ModelError(
            f"{path} could not be read as weights ({_reason(error)})",
            fix="if it is a whole model, write its weights: torch.save(model.state_dict(), ...); sipp runs no code "
            "from files" if is_module else "give an intact .safetensors, or a .pt that holds only tensors",
        ) from error  # fmt: skip


def _load_into(model: nn.Module, state: dict[str, Tensor] | None, path: Path) -> None:
    """Loads tensors into the network; ModelError if they do not match it."""
    if state is None:
        raise ModelError(
            f"{path} holds no state_dict of tensors", fix="give the file of torch.save(model.state_dict(), ...)"
        )
    own = model.state_dict()
    for name in own.keys() & state.keys():
        is_tensor = isinstance(own[name], Tensor)  # and not the extra state of a module
        if is_tensor and _dtype_kind(state[name]) != _dtype_kind(own[name]):  # torch would cast silently
            raise ModelError(
                f"{path} does not fit {type(model).__name__}, {name} is {state[name].dtype} in the file and "
                f"{own[name].dtype} in the network",
                fix="convert it to plain numbers of the network's type",
            )
    try:
        missing, unknown = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # it lists all shape mismatches
        raise ModelError(f"{path} does not fit {type(model).__name__}, {' '.join(str(error).split())}") from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in parameters.items() if name in state}
    buffers = {name for name, _ in model.named_buffers()}  # including those that are not stored
    missing = [n for n in missing if not n.endswith(COUNTER) and id(parameters.get(n)) not in loaded]  # unless tied
    unknown = [name for name in unknown if name not in buffers]
    differences = [
        f"{text}: {words.listed(names)}"
        for text, names in (("not in the file", missing), ("not in the network", unknown))
        if names
    ]
    if differences:
        raise ModelError(f"{path} does not fit {type(model).__name__}, {'; '.join(differences)}")


def _dtype_kind(tensor: Tensor) -> str:
    """The kind of a dtype; only tensors of one kind may be cast to each other."""
    return "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "whole"


def _reason(error: Exception) -> str:
    """Why a file could not be read, without torch's advice on how to execute its content."""
    if isinstance(error, pickle.UnpicklingError):
        return "it is not a whole file of tensors, or holds more than tensors"
    return f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ")


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
    masked = [name for name in known if {f"{name}_orig", f"{name}_mask"} <= state.keys() - known]
    if any(state[f"{name}_orig"].shape != state[f"{name}_mask"].shape for name in masked):
        return state  # not such masks; their names are refused later
    folded = {}
    for name in masked:
        mask = state[f"{name}_mask"]
        folded[name] = (state[f"{name}_orig"] * mask).masked_fill(mask == 0, 0.0)
    taken = {f"{name}_{part}" for name in masked for part in ("orig", "mask")}
    return {name: value for name, value in state.items() if name not in taken} | folded
