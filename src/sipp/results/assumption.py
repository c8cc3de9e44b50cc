"""The result of `check_assumption` (T4): counts per layer, a table and a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sipp.results import words
from sipp.results.bounds import Measured
from sipp.results.sheet import PERCENT, Sheet, Table, shown


@dataclass(frozen=True)
class LayerAssumption:
    """The test of the assumption on one weight tensor."""

    name: str
    fan_in: int
    n_weights: int
    n_holding: int  # weights with g_j(x) > 1/C on S often enough; one of value 0, or never met, has g_j = 0
    es_failures: int | None  # pairs of the holdout with g_j(x) > C s_j; None without a holdout
    n_pairs: int | None  # (input, weight) pairs of the holdout with g_j(x) > 0

    @property
    def share_holding(self) -> float:
        return self.n_holding / self.n_weights

    @property
    def es_failure_share(self) -> float | None:
        """The share of failing pairs; None without pairs."""
        return self.es_failures / self.n_pairs if self.es_failures is not None and self.n_pairs else None


@dataclass(frozen=True)
@shown
class Assumption:
    """The test of the theory's assumption on a network (T4). `print` it."""

    layers: tuple[LayerAssumption, ...]  # in the order of the model's parameters
    c_constant: float
    k_constant: float
    n_calibration: int
    n_holdout: int  # 0 without a holdout
    share_needed: float  # 1 - exp(-1/K_s): the share of points on which each g_j must exceed 1/C
    unit: Literal[
        "inputs", "batches"
    ]  # what the two numbers count: batches where a point's patches depend on its batch
    measured: Measured | None = None  # the C that held on all of the holdout (T19); None without one

    ALSO_IN_JSON = ("verdict", "es_verdict")

    @property
    def total(self) -> LayerAssumption:
        """The counts of the whole network, as one layer with the largest fan-in."""
        return LayerAssumption(
            name="all",
            fan_in=max(layer.fan_in for layer in self.layers),
            n_weights=sum(layer.n_weights for layer in self.layers),
            n_holding=sum(layer.n_holding for layer in self.layers),
            es_failures=sum(layer.es_failures or 0 for layer in self.layers) if self.n_holdout else None,
            n_pairs=sum(layer.n_pairs or 0 for layer in self.layers) if self.n_holdout else None,
        )

    @property
    def plausible(self) -> bool:
        """Whether every weight exceeded 1/C on S as often as assumed."""
        return self.total.n_holding == self.total.n_weights

    @property
    def verdict(self) -> str:
        """A sentence: whether the assumption looks plausible on this data, and what that means."""
        total = self.total
        often = f"above 1/C = {1 / self.c_constant:.3g} on at least {self.share_needed:.1%} of the {self.unit}"
        seen = f"{total.n_holding:,} of {total.n_weights:,} weights were {often} (n={self.n_calibration})"
        if self.plausible:
            return (
                f"The theory's assumption looks plausible on this data: {seen}. The paper's bounds rest on it; a "
                "certificate does not."
            )
        text = (
            f"The theory's assumption does not look plausible on this data: {seen}, but it is about every weight. "
            "The paper's bounds rest on it and are not proved here; a certificate does not need it."
        )
        if any(layer.n_holding < layer.n_weights and layer.fan_in > self.c_constant for layer in self.layers):
            text += (
                " Read literally, it nearly always fails once rows have more than a few weights: the ratios of a row "
                "sum to at most 1 in a patch and quadrant, so fewer than C of its weights can be above 1/C at once."
            )
        return text

    @property
    def es_verdict(self) -> str:
        """A sentence: how often the ES inequality, which the assumption implies, failed on the holdout."""
        total = self.total
        if total.es_failures is None:
            return "The ES inequality was not checked: pass a holdout."
        counts = f"{total.es_failures:,} of {total.n_pairs:,} (input, weight) pairs"
        text = f"The ES inequality w a <= C s z failed for {counts} on {self.n_holdout} holdout {self.unit}."
        if self.measured is None or self.measured.c_constant is None:
            return text
        share, sure = words.percent_up(self.measured.share), words.how_sure(self.measured.confidence)
        return f"{text} With C = {self.measured.c_constant:.4g} it holds for all but {share} of new inputs, {sure}."

    @property
    def sheet(self) -> Sheet:
        columns = {
            "weight": "name", "fan-in": "fan_in", "weights": "n_weights", "holding": "n_holding",
            "share": "share_holding", "pairs": "n_pairs", "ES failures": "es_failures", "failing": "es_failure_share",
        }  # fmt: skip
        forms = {"share": PERCENT, "failing": "{:.2g}".format}
        table = Table.of((*self.layers, self.total), columns, bars=("share",), forms=forms)
        return Sheet(self.verdict, tables=(table,), note=self.es_verdict)
