"""What a run of a recipe is: its configuration, and what else decides its numbers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Origin:
    """What decides a run's numbers beside its configuration."""

    code: str  # version of this package and of torch, and a digest of the package's source
    data: str  # digest of the splits, which includes the content of the data
    device: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of a run; more than one origin: it was resumed with other data, code or device."""

    config: dict[str, Any]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class PlannedPruning:
    """How many levels a run has, and which methods."""

    methods: tuple[str, ...]
    levels: int | None = None
    keeps: tuple[float, ...] | None = None  # instead of levels

    @property
    def n_levels(self) -> int:
        return len(self.keeps) if self.keeps is not None else self.levels or 0


@dataclass(frozen=True)
class PlannedData:
    """The data of a run."""

    name: str


@dataclass(frozen=True)
class Planned:
    """The part of a run's configuration that its plan needs, without the recipe."""

    name: str
    pipeline: str
    net: str
    repetitions: int
    seed: int
    prune: PlannedPruning
    data: PlannedData
