"""The network in FILE, a file from `sipp.save` or a folder from `sipp prune`, and inputs for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.hugging_face import PREFIX
from sipp.cli.inputs import Drawn, Reader
from sipp.cli.networks import load_model
from sipp.cli.options import Stored
from sipp.cli.texts import is_language_model, is_text, length_of
from sipp.results import AnyCertificate, Pruned, SavedFile, SavedNetwork
from sipp_lab.nets import NETS

GIVE_FILE = "give a file that sipp.save or `sipp prune --out NAME.safetensors` wrote, or a folder of `sipp prune`"
EXAMPLE_TOKENS = 64  # per sequence in an example for a language model; --length gives another number


@dataclass(frozen=True)
class StoredNetwork:
    """A stored network, in eval mode on the CPU, and its certificate."""

    name: str  # as for --model
    model: nn.Module
    record: SavedNetwork
    certificate: AnyCertificate | None  # of this very network

    @property
    def pruned(self) -> Pruned | None:
        """The network as `prune` returned it; None if the file does not say how it was pruned."""
        facts = self.record.pruned
        if facts is None:
            return None
        if isinstance(self.record, SavedFile):
            masks = self.record.masks
        else:
            masks = {layer.name: self.model.get_parameter(layer.name).detach() != 0 for layer in facts.layers}
        return replace(facts, model=self.model, masks=masks)


def record_in(file: Path) -> SavedNetwork:
    """The record of the network in FILE."""
    with naming_option(f"FILE {file}", GIVE_FILE):
        return sipp.inspect(file)


def stored_network(asked: Stored) -> StoredNetwork:
    """Loads the network, built by --model, or by what the folder's report names if that runs no code of a user.

    The class or function that a file names is never imported: user code must be named on the command line.
    """
    record = record_in(asked.file)
    recorded, certificate = record.model, record.certificate
    if certificate is not None and certificate.pruned_hash != record.pruned_hash:  # about values before rounding
        certificate = None
    if asked.model is None and recorded not in NETS and not recorded.startswith(PREFIX):
        raise CommandError(
            f"the network {recorded:.60} cannot be built from this file alone",
            where=f"FILE {asked.file}",
            fix="pass --model, such as --model my.py:net",
        )
    name = asked.model or recorded
    return StoredNetwork(name, load_model(name, asked.file, option="FILE"), record, certificate)


def inputs_for(network: StoredNetwork, asked: Stored, n: int, batch_size: int | None = None) -> Drawn:
    """Inputs from --data; without a `batch_size` they are in one batch."""
    if asked.data is None:
        raise CommandError(f"{network.name} needs inputs to run on", where=f"FILE {asked.file}", fix="give --data")
    reading = asked.reading
    if reading.length is None and is_language_model(network.name) and is_text(Path(asked.data)):
        reading = replace(reading, length=min(length_of(network.name, None), EXAMPLE_TOKENS))
    reader = Reader(network.model, network.name, reading)
    return reader.draw(reader.open(asked.data), n, batch_size or n)
