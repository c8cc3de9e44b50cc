"""A pruned network as it is stored: how it was pruned, its hashes, its certificate.

All of it lies in one JSON object; the keys are those of `Pruned` and of `SavedNetwork`, and what a command adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch

from sipp import __version__
from sipp.errors import DataError, ModelError, OptionError
from sipp.results import check, hashing
from sipp.results.certificate import AnyCertificate
from sipp.results.jsonio import NOT_JSON, from_json, to_json
from sipp.results.pruned import Pruned
from sipp.results.sheet import Sheet, Table, shown

Kind = TypeVar("Kind", bound="SavedNetwork")


@dataclass(frozen=True, kw_only=True)
@shown
class SavedNetwork:
    """A stored network: how it was pruned, its hashes, its certificate. `print` it."""

    model: str  # its class, or the value of --model
    pruned_hash: str  # of the network itself: in a file, with its values as they are stored
    buffers_hash: str | None = None  # of buffers that its state_dict leaves out; None: it has none
    dense_hash: str | None = None  # None: unknown
    certificate: AnyCertificate | None = None  # of the pruned network
    weights: str | None = None  # the file of the dense weights, from the command line
    sipp: str = __version__
    torch: str = str(torch.__version__)
    # how it was pruned, whose facts lie beside these in JSON; None: nobody said
    pruned: Pruned | None = field(default=None, metadata=NOT_JSON)
    rest: Mapping[str, Any] = field(default_factory=dict, metadata=NOT_JSON)  # what else the command wrote

    KIND: ClassVar = "pruned"

    @classmethod
    def of(cls, pruned: Pruned, certificate: AnyCertificate | None = None) -> SavedNetwork:
        """The record of a pruned network as it is now; the dense network's hash is a certificate's."""
        check.kind("pruned", pruned, Pruned, "give the result of sipp.prune")
        if pruned.regrown:
            raise ModelError(
                "a pruned weight is not zero any more, so the record does not describe this network",
                where=pruned.regrown,
                fix="hold the masks while you train (sipp.hold), or set the pruned weights to zero",
            )
        pruned_hash = hashing.of_model(pruned.model)
        if certificate is not None and certificate.pruned_hash != pruned_hash:
            raise OptionError("the certificate is about another network", fix="certify pruned.model")
        return cls(
            model=hashing.class_name(pruned.model),
            pruned_hash=pruned_hash,
            buffers_hash=hashing.of_buffers(pruned.model),
            dense_hash=None if certificate is None else certificate.dense_hash,
            certificate=certificate,
            pruned=pruned.up_to_date,
        )

    @classmethod
    def read(cls: type[Kind], values: Mapping[str, Any], where: object) -> Kind:
        """The inverse of `values`; a DataError names the key that is wrong."""
        if values.get("kind") != cls.KIND:
            raise DataError("is not a report of `sipp prune`", where=where, fix="prune the network again")
        pruned = from_json(Pruned, values, where) if "method" in values else None
        record: Kind = replace(from_json(cls, values, where), pruned=pruned)
        known = record.values
        return replace(record, rest={key: value for key, value in values.items() if key not in known})

    @property
    def values(self) -> dict[str, Any]:
        """All of it in one JSON object."""
        facts = {} if self.pruned is None else to_json(self.pruned)
        return {"kind": self.KIND, **to_json(self), **facts, **self.rest}

    @property
    def certified(self) -> str:
        """The certificate in words; empty without one."""
        return "" if self.certificate is None else self.certificate.sentence

    @property
    def asked(self) -> Mapping[str, Any] | None:
        """What was asked of `sipp prune`; None: it was pruned in Python."""
        asked = self.rest.get("asked")
        return asked if isinstance(asked, dict) else None

    @property
    def data(self) -> Mapping[str, Any]:
        """What `sipp prune` read; empty if it read nothing, or in Python."""
        return self.rest.get("data") or {}

    @property
    def facts(self) -> list[tuple[str, str]]:
        """How it was pruned, and the error; if that was not recorded, the certificate."""
        if self.pruned is None:
            return [("certificate", self.certified)] if self.certified else []
        return self.pruned.facts(certified=self.certified)

    @property
    def sheet(self) -> Sheet:
        title, tables = self.model, tuple[Table, ...]()
        if self.pruned is not None:
            title, tables = self.pruned.headline, (self.pruned.layers_table(is_short=True),)
        return Sheet(title, (("model", self.model), *self.facts), tables)
