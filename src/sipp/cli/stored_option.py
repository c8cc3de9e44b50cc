"""The network in FILE, a file from `sipp.save` or a folder from `sipp prune`, and an example input for it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

import sipp
from sipp.cli.data_option import Points, Reader
from sipp.cli.data_sources import noise_for
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.hugging_face_models import PREFIX
from sipp.cli.language_text import is_language_model, is_text, length_of
from sipp.cli.model_option import load_model
from sipp.cli.options import InputOptions, StoredOptions
from sipp.results import AnyCertificate, Pruned, Report, SavedFile
from sipp_lab.nets import NETS

GIVE_FILE = "give a file that sipp.save or `sipp prune --out NAME.safetensors` wrote, or a folder of `sipp prune`"
EXAMPLE_TOKENS = 64  # per sequence in an example for a language model; --length gives another number


@dataclass(frozen=True)
class StoredNetwork:
    """A stored network, in eval mode on the CPU, and what is certified of it."""

    name: str  # as for --model
    model: nn.Module
    contents: SavedFile | Report
    certificate: AnyCertificate | None

    @property
    def record(self) -> Pruned | None:
        """The record of `prune`, which a folder holds; None for a file of `sipp.save`."""
        if not isinstance(self.contents, Report):
            return None
        facts = self.contents.pruned
        masks = {layer.name: self.model.get_parameter(layer.name).detach() != 0 for layer in facts.layers}
        values = {one.name: getattr(facts, one.name) for one in fields(facts)}
        return Pruned(model=self.model, masks=masks, **values)


def stored_network(asked: StoredOptions) -> StoredNetwork:
    """Loads the network, built by --model, or by what the folder's report names if that runs no code of a user.

    The class or function that a file names is never imported: user code must be named on the command line.
    """
    with naming_option(f"FILE {asked.file}", GIVE_FILE):
        contents = sipp.inspect(asked.file)
    if isinstance(contents, Report):
        recorded, certificate = contents.identity.model, contents.identity.certificate
    else:
        recorded, certificate = contents.model, contents.certificate
        certificate = certificate if contents.certificate_about == "stored values" else None
    is_known = recorded in NETS or recorded.startswith(PREFIX)
    if asked.model is None and not is_known:
        raise CommandError(
            f"it holds a {recorded:.60}, and does not say how that is built",
            where=f"FILE {asked.file}",
            fix="say it: --model my.py:function, or the name of a built-in network",
        )
    name = asked.model or recorded
    return StoredNetwork(name, load_model(name, asked.file, option="FILE"), contents, certificate)


def example_for(
    network: StoredNetwork, asked: StoredOptions, n_points: int, batch_size: int | None = None
) -> tuple[Any, Points]:
    """The first batch of `n_points`, from --data or noise in a built-in network's shape, and all of them.

    Without a `batch_size` they are in one batch.
    """
    spec = asked.data or noise_for(network.name, n_points)
    if spec is None:
        raise CommandError(
            f"{network.name} needs inputs to run on",
            where=f"FILE {asked.file}",
            fix=f"give --data, such as random:{n_points}x3x32x32",
        )
    read = asked.reading
    options = InputOptions(
        normalise=read.normalise, size=read.size, length=read.length, batch_size=batch_size or n_points
    )
    if options.length is None and is_language_model(network.name) and is_text(Path(spec)):
        options = replace(options, length=min(length_of(network.name, None), EXAMPLE_TOKENS))
    reader = Reader(network.model, network.name, options)
    points = reader.draw(reader.open(spec), n_points)
    (batch,) = points.batches[:1]
    inputs = batch[0] if isinstance(batch, tuple) else batch  # without labels
    return inputs, points
