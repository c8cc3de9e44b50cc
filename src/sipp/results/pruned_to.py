"""The result of `prune_to`, and access to the network in any result that has one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from sipp.errors import ModelError, OptionError
from sipp.results import check, hashing, words
from sipp.results.certificate import AnyCertificate
from sipp.results.gradual import Gradual
from sipp.results.jsonio import NOT_JSON
from sipp.results.pruned import Pruned, SeenInputs
from sipp.results.sheet import PERCENT, Sheet, Table, shown
from sipp.results.shrunk import Shrunk

PATH_WORDS = (
    "beyond: holdout inputs further off than epsilon, or with a changed answer; proved: the largest share of such new "
    "inputs, or the largest drop"
)
CHANGED_SINCE = (
    "its weights or buffers changed after it was certified, by training or by hand, so the certificate no longer "
    "applies; call sipp.certify with new inputs"
)


@dataclass(frozen=True)
class Level:
    """One tested level: how many inputs were off, and whether the claim is proved."""

    keep: float
    budget: int
    count: int  # violations, or points whose class got wrong (without labels: changed)
    limit: float  # the proved limit of their share, or of the accuracy drop
    passed: bool

    @property
    def outcome(self) -> str:
        return "passed" if self.passed else "failed"


@dataclass(frozen=True)
@shown
class PrunedTo:
    """The sparsest certified network, its certificate, and all tested levels. `print` it."""

    model: nn.Module = field(metadata=NOT_JSON)  # the sparsest network that passed, or the dense one
    pruned: Pruned | None  # None: no level passed
    certificate: AnyCertificate | None
    path: tuple[Level, ...]  # of a grid fixed in advance; the first was chosen on the calibration data
    verdict: str

    ALSO_IN_JSON = ("keep",)

    @property
    def keep(self) -> float:
        return self.pruned.keep if self.pruned is not None else 1.0

    @property
    def sheet(self) -> Sheet:
        title = self.verdict
        note = "" if self.certificate is None else self.certificate.sentence
        if self.certificate is not None and certificate_of(self, None) is None:
            title, note = CHANGED_SINCE, ""
        columns = {
            "keep": "keep", "weights": "budget", "beyond": "count", "proved": "limit", "test": "outcome",
        }  # fmt: skip
        forms = {"keep": PERCENT, "proved": words.percent_up}
        table = Table.of(self.path, columns, bars=("keep", "proved"), words=PATH_WORDS, forms=forms)
        return Sheet(title, tables=(table,) if self.path else (), note=note)


NetworkLike = nn.Module | Pruned | PrunedTo | Shrunk | Gradual  # a network, or a result that holds one


def inputs_seen(given: NetworkLike) -> SeenInputs:
    """The inputs that chose a network: not all are known if its weights have changed since."""
    record = given.pruned if isinstance(given, PrunedTo) else given
    if not isinstance(record, Pruned | Shrunk):
        return SeenInputs()
    is_unchanged = hashing.of_model(network_of(given)) == record.described_hash
    return record.seen if is_unchanged else record.seen | SeenInputs()


def record_of(given: Pruned | PrunedTo) -> Pruned:
    """The record of the pruned network; OptionError if `prune_to` found none. Anything else is returned as it is."""
    if not isinstance(given, PrunedTo):
        return given
    if given.pruned is None:
        raise OptionError(
            "prune_to could not certify any level, so there is no pruned network",
            fix="ask for less, or give a larger holdout",
        )
    return given.pruned


def certificate_of(given: NetworkLike, certificate: AnyCertificate | None) -> AnyCertificate | None:
    """The given certificate, or that of `prune_to` if its network is unchanged."""
    if certificate is not None:
        return check.kind("certificate", certificate, AnyCertificate, "give the result of sipp.certify")
    held = given.certificate if isinstance(given, PrunedTo) else None
    return held if held is not None and held.pruned_hash == hashing.of_model(network_of(given)) else None


def network_of(given: NetworkLike) -> nn.Module:
    """The network in any result; ModelError if there is none."""
    if isinstance(given, Pruned | PrunedTo | Shrunk | Gradual):
        return given.model
    if not isinstance(given, nn.Module):
        raise ModelError(
            f"the network is a {type(given).__name__}, not an nn.Module", fix="give a model, not its class"
        )
    return given
