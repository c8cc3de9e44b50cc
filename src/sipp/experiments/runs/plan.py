"""The networks of a run and their names, in the order in which they are made. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sipp.experiments.arms import SEPARATOR

Recipe = Any  # its schema lists the pipelines, which import this file


@dataclass(frozen=True)
class Stage:
    """One network of a run: level 0 is the dense one, which has no method; others have the label of an arm."""

    seed: int
    method: str | None
    level: int

    @property
    def name(self) -> str:
        """What its folder is called."""
        arm = None if self.method is None else self.method.replace(SEPARATOR, "-")
        return f"seed{self.seed}.dense" if arm is None else f"seed{self.seed}.{arm}.{self.level:02d}"


def stages_of(seeds: Sequence[int], methods: Sequence[str], levels: int) -> list[Stage]:
    """The networks of these seeds, methods and levels, in the order in which they are made."""
    stages = []
    for seed in seeds:
        stages.append(Stage(seed, None, 0))
        for method in methods:
            stages += [Stage(seed, method, level) for level in range(1, levels + 1)]
    return stages


def plan(recipe: Recipe) -> list[Stage]:
    """All networks of a recipe's run, in the order in which they are made."""
    return stages_of(recipe.seeds, recipe.prune.methods, recipe.prune.n_levels)
