"""The networks of a run, in the order in which they are trained. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sipp_lab.arms import SEPARATOR

Recipe = Any  # importing it would be circular


@dataclass(frozen=True)
class Stage:
    """One network of a run: the dense one (level 0, no method), or a level of an arm (`method` is its label)."""

    seed: int
    method: str | None
    level: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        arm = None if self.method is None else self.method.replace(SEPARATOR, "-")
        return f"seed{self.seed}.dense" if arm is None else f"seed{self.seed}.{arm}.{self.level:02d}"


def stages_of(seeds: Sequence[int], methods: Sequence[str], levels: int) -> list[Stage]:
    """All networks for these seeds, methods and levels, in training order."""
    stages = []
    for seed in seeds:
        stages.append(Stage(seed, None, 0))
        for method in methods:
            stages += [Stage(seed, method, level) for level in range(1, levels + 1)]
    return stages


def plan(recipe: Recipe) -> list[Stage]:
    """All networks of a recipe's run, in training order."""
    return stages_of(recipe.seeds, recipe.prune.methods, recipe.prune.n_levels)
