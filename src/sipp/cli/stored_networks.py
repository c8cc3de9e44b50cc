"""Loads stored networks: a file from `sipp.save`, or a folder from `sipp prune`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import sipp
from sipp.cli.data_option import Points, Reader
from sipp.cli.data_sources import data_or_noise
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.language_text import is_language_model, length_of
from sipp.cli.model_option import load_model
from sipp.cli.options import InputOptions, StoredOptions
from sipp.inputs.data import data_of
from sipp.results.jsonio import to_json
from sipp.results.network_hash import class_name
from sipp.results.saved_file import SavedFile
from sipp.storage.outputs import WEIGHTS_NAME
from sipp.storage.pruned_folder import read_pruned
from sipp.storage.tensors import read_tensors
from sipp_lab.nets import NETS, build, n_classes_in

GIVE_FILE = "give a file that sipp.save or `sipp prune --out NAME.safetensors` wrote, or a folder of `sipp prune`"


EXAMPLE_TOKENS = 64  # per sequence in an example for a language model

Tensors = dict[str, tuple[tuple[int, ...], str]]  # shape and dtype by name


@dataclass(frozen=True)
class StoredNetwork:
    """A stored network, in eval mode on the CPU, and the content of its file."""

    name: str  # as for --model
    model: nn.Module
    contents: SavedFile


def read_contents(path: Path) -> SavedFile:
    """The content of a file from `sipp.save`."""
    if path.is_dir():
        raise CommandError(
            f"{path} is a folder; a file is needed",
            where=f"FILE {path}",
            fix="give a file from sipp.save; `sipp report` and `sipp bench` take folders",
        )
    with naming_option(f"FILE {path}", GIVE_FILE):
        return sipp.inspect(path)


def contents_record(contents: SavedFile, name: str | None) -> dict[str, Any]:
    """The content of a file as JSON values; `name` is the built-in network, if any."""
    return {"kind": "network file", "sipp": sipp.__version__, "network": name, **to_json(contents)}


def stored_network(path: Path, model: str | None) -> StoredNetwork:
    """Loads a network from a file or folder, built by `model` or as the built-in network with the same tensors.

    The class named in a file is never imported: user code must be named on the command line.
    """
    if path.is_dir():
        return _from_folder(path, model)
    contents = read_contents(path)
    name = model or built_in(contents)
    if name is None:
        raise _unknown_network(path, contents.model)
    shapes = {key: tensor.shape for tensor in contents.tensors for key in tensor.names}
    network = load_model(name, n_classes=n_classes_in(name, shapes) if name in NETS else None)
    with naming_option(f"FILE {path}, --model {name}", "give the network that was saved"):
        sipp.load(path, into=network)
    return StoredNetwork(name, network.eval(), contents)


def built_in(contents: SavedFile) -> str | None:
    """The built-in network with this class and these tensors, or None."""
    return _matching_net(
        contents.model, {name: (tensor.shape, tensor.dtype) for tensor in contents.tensors for name in tensor.names}
    )


def _matching_net(model: str, tensors: Tensors) -> str | None:
    shapes = {key: shape for key, (shape, _) in tensors.items()}
    return next((name for name in NETS if _net_tensors(name, n_classes_in(name, shapes)) == (model, tensors)), None)


@cache
def _net_tensors(name: str, n_classes: int | None) -> tuple[str, Tensors]:
    """The class, and shapes and dtypes of tensors, of a built-in network with this many classes."""
    with torch.device("meta"):
        net = build(name, n_classes=n_classes)
    tensors = {key: (tuple(value.shape), str(value.dtype)[6:]) for key, value in net.state_dict().items()}
    return class_name(net), tensors


def example_for(stored: StoredNetwork, asked: StoredOptions, n_points: int) -> tuple[Any, Points]:
    """An example batch of `n_points`, from --data or noise in a built-in network's shape."""
    spec = data_or_noise(asked.data, stored.name, n_points, f"FILE {asked.file}")
    length = min(length_of(stored.name, None), EXAMPLE_TOKENS) if is_language_model(stored.name) else None
    options = InputOptions(normalise=asked.normalise, size=asked.size, length=length, batch_size=n_points)
    reader = Reader(stored.model, stored.name, options)
    points = reader.draw(reader.open(spec), n_points)
    batch = next(iter(data_of(points.batches).batches()))
    return batch.kwargs or batch.args, points


def _from_folder(folder: Path, model: str | None) -> StoredNetwork:
    """The network in a folder from `sipp prune`, and what a file from `sipp.save` would contain."""
    with naming_option(f"FILE {folder}", GIVE_FILE):
        report, _ = read_pruned(folder)
        recorded = report.identity.model
        tensors, _ = read_tensors(folder / WEIGHTS_NAME)
    kinds = {key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for key, tensor in tensors.items()}
    name = model or (recorded if recorded in NETS else _matching_net(recorded, kinds))
    if name is None:
        raise _unknown_network(folder, f"{recorded!r:.60}")
    network, certificate = load_model(name, folder / WEIGHTS_NAME), report.identity.certificate
    with tempfile.TemporaryDirectory() as place, naming_option(f"FILE {folder}", GIVE_FILE):
        contents = sipp.save(network, Path(place) / "net", certificate=certificate)
    return StoredNetwork(name, network, replace(contents, path=folder))


def save_small(stored: StoredNetwork, out: Path, values: Literal["same", "bf16", "fp16"]) -> SavedFile:
    """Writes a stored network to one small file, with its certificate."""
    contents = stored.contents
    certificate = contents.certificate if contents.certificate_about == "stored values" else None
    return sipp.save(stored.model, out, values="fp32" if values == "same" else values, certificate=certificate)


def _unknown_network(path: Path, what: str) -> CommandError:
    return CommandError(
        f"it holds a {what}, which is not a built-in network of the usual size",
        where=f"FILE {path}",
        fix="say how it is built: --model package.module:callable",
    )
