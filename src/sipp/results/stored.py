"""What is written about a pruned network, as report.json and `--json`: its facts, its hashes, what is certified.

All of it lies in one JSON object; the keys are those of `Pruned` and of `Report`, and what a command adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sipp import __version__
from sipp.errors import DataError, ModelError, OptionError
from sipp.results import check, hashing
from sipp.results.certificate import AnyCertificate
from sipp.results.jsonio import NOT_JSON, from_json, to_json
from sipp.results.pruned import Pruned
from sipp.results.sheet import Sheet, shown

KIND = "pruned"


_NO_PRUNED: Any = None


@dataclass(frozen=True)
@shown
class Report:
    """The report in the folder of a pruned network: which networks it is about, and what is certified. `print` it."""

    model: str  # its class, or the value of --model
    pruned_hash: str
    buffers_hash: str | None = None  # of buffers that its state_dict leaves out; None: it has none
    dense_hash: str | None = None  # None: unknown
    certificate: AnyCertificate | None = None  # of the pruned network
    weights: str | None = None  # the file of the dense weights, from the command line
    sipp: str = ""
    torch: str = ""
    pruned: Pruned = field(default=_NO_PRUNED, metadata=NOT_JSON)  # its facts lie beside these in a file
    rest: Mapping[str, Any] = field(default_factory=dict, metadata=NOT_JSON)  # what else the command wrote
    note: str = field(default="", metadata=NOT_JSON)  # what could not be checked

    @classmethod
    def of(cls, pruned: Pruned, certificate: AnyCertificate | None = None) -> Report:
        """The report on a pruned network as it is now; the dense network's hash is a certificate's."""
        check.kind("pruned", pruned, Pruned, "pass what sipp.prune returned")
        if pruned.regrown:
            raise ModelError(
                "a weight outside its mask is not zero: the record would count the weights of another network",
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
            sipp=__version__,
            torch=str(torch.__version__),
            pruned=pruned.up_to_date,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any], where: object) -> Report:
        """The inverse of `values`; a DataError says which key is wrong."""
        if values.get("kind") != KIND:
            raise DataError("is not a report of `sipp prune`", where=where, fix="prune the network again")
        report = replace(from_json(cls, values, where), pruned=from_json(Pruned, values, where))
        return replace(report, rest={key: value for key, value in values.items() if key not in report.values})

    @property
    def values(self) -> dict[str, Any]:
        """All of it in one JSON object."""
        return {"kind": KIND, **to_json(self), **to_json(self.pruned), **self.rest}

    @property
    def sheet(self) -> Sheet:
        sheet = self.pruned.sheet
        certificate = self.certificate
        claim = "none" if certificate is None else certificate.sentence
        facts = (("network", self.model), *sheet.facts, ("certificate", claim))
        return replace(sheet, facts=facts, note=self.note)
