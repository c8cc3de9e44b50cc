"""What `prune_to` returns, and how to get the network out of any result that holds one."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import nn

from sipp.errors import ModelError, OptionError
from sipp.records.certificate import AnyCertificate
from sipp.records.display import PATH_WORDS, WIDTH, percent_up, plain_table, text_of
from sipp.records.html import folded, table_html, text_html, view
from sipp.records.network_hash import model_hash, tensors_hash
from sipp.records.plots import curves
from sipp.records.pruned import Pruned
from sipp.records.shrunk import Shrunk

CHANGED_SINCE = (
    "its weights or buffers changed after it was certified, by training or by hand, so nothing is certified of them; "
    "sipp.certify with new inputs says what holds"
)


@dataclass(frozen=True)
class Level:
    """One test of the walk: how many points were bad, and whether the claim is proved at this level."""

    keep: float
    budget: int
    count: int  # violations, or points that lost their right class (their class, without labels)
    limit: float  # the proved limit of their share, or of the accuracy drop
    passed: bool


@dataclass(frozen=True)
class PrunedTo:
    """The sparsest certified network, its certificate, and the path of all tests. `print` it."""

    model: nn.Module  # the sparsest that passed, or the dense network
    pruned: Pruned | None  # None: no level passed
    certificate: AnyCertificate | None
    path: tuple[Level, ...]
    levels: tuple[float, ...]  # the whole grid, as fixed in advance
    start: int  # where the walk began, chosen on the calibration data
    verdict: str

    @property
    def keep(self) -> float:
        return self.pruned.keep if self.pruned is not None else 1.0

    def _table(self) -> Table:
        """One line a level that was tested."""
        table = plain_table("keep", "weights", "bad inputs", "proved limit", "test")
        for level in self.path:
            limit, word = percent_up(level.limit), "passed" if level.passed else "failed"
            table.add_row(f"{level.keep:.2%}", f"{level.budget:,}", f"{level.count:,}", limit, word)
        return table

    @property
    def _words_now(self) -> tuple[str, str]:
        """The verdict and the certificate's sentence, as long as they are about the network as it is now."""
        if self.certificate is None:
            return self.verdict, ""
        if certificate_of(self, None) is None:
            return CHANGED_SINCE, ""
        return self.verdict, self.certificate.sentence

    def __str__(self) -> str:
        verdict, sentence = self._words_now
        said = [textwrap.fill(sentence, WIDTH)] if sentence else []
        return "\n".join([verdict, *([text_of(self._table()), PATH_WORDS] if self.path else []), *said])

    def __repr__(self) -> str:
        return f"<PrunedTo {type(self.model).__name__} at keep {self.keep:.2%}; print() shows the path>"

    def _repr_html_(self) -> str:
        verdict, said = self._words_now
        path = [table_html(self._table(), bars=("keep", "proved limit")), text_html(PATH_WORDS)] if self.path else []
        network = [] if self.pruned is None else [folded("The network", str(self.pruned))]
        return view(verdict, text_html(said), *path, *network)

    def plot(self, ax: Any = None) -> Any:
        """Draws what was proved at each level that was tested, on `ax` or on new axes, and gives them."""
        lines = {
            word: (
                [100 * level.keep for level in self.path if level.passed == passed],
                [100 * level.limit for level in self.path if level.passed == passed],
            )
            for word, passed in (("passed", True), ("failed", False))
        }
        return curves(ax, lines, "weights kept (%)", "proved limit (%)")


NetworkLike = nn.Module | Pruned | PrunedTo | Shrunk  # what stands for a network: itself, or what a verb gave


def pruned_or_module(given: NetworkLike) -> nn.Module | Pruned:
    """The record of the pruned network; the network itself where there is no record of it."""
    if isinstance(given, Shrunk):
        return given.model
    return (given.pruned or given.model) if isinstance(given, PrunedTo) else given


def points_seen(given: NetworkLike) -> tuple[frozenset[bytes], bool]:
    """Keys of the points that chose the network, as far as its record knows them, and whether these are all.

    They are not if the weights have changed since, because nobody knows with which points.
    """
    record = given if isinstance(given, Shrunk) else pruned_or_module(given)
    if not isinstance(record, Pruned | Shrunk):
        return frozenset(), False
    return record.seen, record.seen_all and tensors_hash(network_of(given)) == record.described_hash


def record_of(given: Pruned | PrunedTo) -> Pruned:
    """The record of the pruned network; OptionError if `prune_to` found none. Anything else is returned as it is."""
    if not isinstance(given, PrunedTo):
        return given
    if given.pruned is None:
        raise OptionError("prune_to pruned nothing: no level passed", fix="ask for less, or give a larger holdout")
    return given.pruned


def certificate_of(given: NetworkLike, certificate: AnyCertificate | None) -> AnyCertificate | None:
    """The certificate that goes with it: the one given, or that of `prune_to` as long as its network is unchanged."""
    held = given.certificate if isinstance(given, PrunedTo) else None
    if certificate is not None or held is None:
        return certificate
    return held if held.pruned_hash == model_hash(network_of(given)) else None


def network_of(given: NetworkLike) -> nn.Module:
    """The network that is meant; ModelError where it is none of these."""
    if isinstance(given, Pruned | PrunedTo | Shrunk):
        return given.model
    if not isinstance(given, nn.Module):
        raise ModelError(f"the network is a {type(given).__name__}, not an nn.Module", fix="give an instance")
    return given
