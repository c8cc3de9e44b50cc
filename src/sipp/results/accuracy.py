"""How often a network is right on labelled inputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accuracy:
    """Of n inputs, how many have the right class as largest output, or among the five largest; and the mean loss."""

    n: int
    n_top1: int
    loss: float  # cross-entropy
    n_top5: int | None = None  # None: not counted

    ALSO_IN_JSON = ("top1", "top5")

    @property
    def top1(self) -> float:
        return self.n_top1 / self.n

    @property
    def top5(self) -> float | None:
        return None if self.n_top5 is None else self.n_top5 / self.n
