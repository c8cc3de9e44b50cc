"""What a run is made of and what it writes: its stages, where its numbers come from, a record of each network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sipp.results import AnyCertificate, BlendTrial, Pruned


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
        return f"seed{self.seed}.{self.method.replace(' ', '+')}.{self.level:02d}"

    @property
    def dense(self) -> Stage:
        """The dense network of its seed."""
        return Stage(self.seed, None, 0)


@dataclass(frozen=True)
class Origin:
    """What decides a run's numbers beside its configuration."""

    code: str  # versions of this package and of torch, and a digest of the package's source
    data: str  # digest of the splits, which includes the content of the data
    device: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of a run; more than one origin: it was resumed with other data, code or device."""

    config: dict[str, Any]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class GradualCut:
    """One cut of a network that is pruned while it is trained."""

    after_step: int
    keep: float
    blend: BlendTrial | None = None  # the score that was chosen, of a blend


@dataclass(frozen=True, kw_only=True)
class NetworkRecord:
    """One network of a run; level 0 is the dense one, which has no method."""

    recipe: str
    pipeline: str
    net: str
    data: str
    seed: int
    method: str | None
    level: int
    after: Accuracy  # of training, on the test inputs
    train_loss: float
    seconds: float
    multiply_adds: int | None = None  # of one input with the weights that are left; None: not counted
    pruned: Pruned | None = None  # before retraining, against the network it was pruned from; None if dense
    before: Accuracy | None = None  # right after pruning
    certificate: AnyCertificate | None = None  # of that network
    why_no_certificate: str = ""  # why it was refused; empty if it was not, or if there is no holdout
    path: tuple[GradualCut, ...] = ()  # of a network that was pruned gradually
    nonzero: Mapping[str, int] = field(default_factory=dict)  # after training, by weight

    ALSO_IN_JSON = ("keep", "dead_rows")

    @property
    def keep(self) -> float:
        return 1.0 if self.pruned is None else self.pruned.keep

    @property
    def dead_rows(self) -> int:
        return 0 if self.pruned is None else self.pruned.dead_rows
