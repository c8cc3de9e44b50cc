"""The result of `prune_on_disk`: the folder, and what was kept of each weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sipp.results.sheet import PERCENT, Sheet, Table, shown, without_empty


@dataclass(frozen=True)
class BlockWeight:
    """One weight of a block, by its name in the files."""

    name: str
    n_weights: int
    n_kept: int
    error_before: float | None  # with the method's mask, on held-back sequences; None: no repair
    error: float | None  # after the repair, on the same sequences

    @property
    def keep(self) -> float:
        return self.n_kept / self.n_weights


@dataclass(frozen=True)
@shown
class PrunedOnDisk:
    """The folder with the pruned network, and what was kept of each weight."""

    folder: Path
    n_blocks: int
    n_resumed: int  # blocks that an earlier run had finished
    n_inputs: int
    weights: tuple[BlockWeight, ...]

    ALSO_IN_JSON = ("n_weights", "kept", "sentence")

    @property
    def n_weights(self) -> int:
        return sum(weight.n_weights for weight in self.weights)

    @property
    def kept(self) -> int:
        return sum(weight.n_kept for weight in self.weights)

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        share = (
            f"{self.kept:,} of {self.n_weights:,} weights ({self.kept / self.n_weights:.1%}) in {self.n_blocks} blocks"
        )
        done = f", {self.n_resumed} of them by an earlier run" if self.n_resumed else ""
        return f"kept {share}{done}; {self.n_inputs} inputs; written to {self.folder}"

    @property
    def sheet(self) -> Sheet:
        columns = {
            "weight": "name", "weights": "n_weights", "keep": "keep", "error before": "error_before", "error": "error",
        }  # fmt: skip
        table = Table.of(self.weights, columns, bars=("keep",), forms={"keep": PERCENT})
        return Sheet(self.sentence, tables=(without_empty(table),))
