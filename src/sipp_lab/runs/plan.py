"""The networks of a run, in the order in which they are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sipp_lab.arms import SEPARATOR


@dataclass(frozen=True)
class Stage:
    """One network of a run: the dense one (level 0, no method), or a level of an arm (`method` is its label)."""

    seed: int
    method: str | None
    level: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        if self.method is None:
            return f"seed{self.seed}.dense"
        return f"seed{self.seed}.{self.method.replace(SEPARATOR, '-')}.{self.level:02d}"

    @property
    def dense(self) -> Stage:
        """The dense network of its seed."""
        return Stage(self.seed, None, 0)


def stages_of(seeds: Sequence[int], methods: Sequence[str], levels: int) -> list[Stage]:
    """All networks for these seeds, methods and levels, in training order."""
    stages = []
    for seed in seeds:
        stages.append(Stage(seed, None, 0))
        stages += [Stage(seed, method, level) for method in methods for level in range(1, levels + 1)]
    return stages
