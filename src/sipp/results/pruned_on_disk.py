"""The result of `prune_on_disk`: the folder, and what was kept of each weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sipp.results.display import number, plain_table, text_of


@dataclass(frozen=True)
class BlockWeight:
    """One weight of a block, by its name in the files."""

    name: str
    n_weights: int
    n_kept: int
    error_before: float | None  # with the method's mask, on held-back sequences; None: no repair
    error: float | None  # after the repair, on the same sequences


@dataclass(frozen=True)
class PrunedOnDisk:
    """The folder with the pruned network, and what was kept of each weight."""

    folder: Path
    n_blocks: int
    n_resumed: int  # blocks that an earlier run had finished
    n_points: int
    weights: tuple[BlockWeight, ...]

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
        return f"kept {share}{done}; {self.n_points} inputs; written to {self.folder}"

    def __str__(self) -> str:
        table = plain_table("weight", "weights", "kept", "error before", "error", tight=True)
        for weight in self.weights:
            errors = number(weight.error_before), number(weight.error)
            table.add_row(weight.name, f"{weight.n_weights:,}", f"{weight.n_kept / weight.n_weights:.1%}", *errors)
        return "\n".join([self.sentence, text_of(table)])

    def __repr__(self) -> str:
        return f"<PrunedOnDisk: {self.sentence}; print() shows the weights>"
