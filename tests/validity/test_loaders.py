"""Simulation: a loader that shuffles between two passes, and ties, make no claim false more often.

Every true rate lies just beyond what is allowed, so each certificate is a false one; at most BETA of the runs may give
one. Each mechanism is then broken on purpose, and the same check must catch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from oracles.rates import at_most
from torch import Tensor, nn

from sipp.certificates.claims import certified_epsilon
from sipp.errors import ModelError
from sipp.results import binomial
from sipp.verbs.prune_to import prune_to

BETA, DELTA = 0.05, 0.1
BARELY_BAD = 0.101
N_POINTS = 46  # one violation is allowed at DELTA; BARELY_BAD then passes 4.7 % of the time
N_LABELLED = 36  # a drop of 0.1 is proved by no lost point; BARELY_BAD then loses none 2.2 % of the time
N_WALKS, N_BROKEN = 80, 40  # simulated walks, and walks that are broken on purpose

WALK = vars(import_module("sipp.certificates.claims"))


def holds(false_claims: list[bool]) -> bool:
    """Whether a rate of false claims is compatible with BETA."""
    return np.mean(false_claims) <= at_most(BETA, len(false_claims))


class Voter(nn.Module):
    """The right class, x[1], at every point; without its smallest weight the wrong one where x[0] < BARELY_BAD."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[3.0, 2.0, 1.0]]))
            self.linear.bias.fill_(-0.5)

    def forward(self, x: Tensor) -> Tensor:
        bad, good = (x[:, :1] < BARELY_BAD).float(), (x[:, :1] > 0.5).float()
        votes = self.linear(torch.cat(((1 - bad) * (1 - good), good, bad), dim=1)) * (2 * x[:, 1:] - 1)
        return torch.cat((-votes, votes), dim=1)


class Loader:
    """Labelled points in batches, in another order in each pass."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.x = torch.rand(N_LABELLED, 2, generator=self.generator)
        self.x[:, 1] = (self.x[:, 1] < 0.5).float()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.x[torch.randperm(len(self.x), generator=self.generator)].split(9):
            yield part, part[:, 1].long()


def false_walks(n_runs: int) -> list[bool]:
    """Whether each run certifies a drop of at most 0.1 of a network that loses BARELY_BAD.

    The first level keeps everything: dense outputs are computed there, and may be looked up at the second.
    """
    options: dict[str, Any] = {"max_accuracy_drop": 0.1, "levels": (1.0, 0.67), "method": "magnitude"}
    return [prune_to(Voter(), iter([torch.zeros(1, 2)]), Loader(seed), **options).keep < 1 for seed in range(n_runs)]


class ByPosition(dict[Any, Tensor]):
    """Dense outputs looked up by the number of the batch."""

    def __init__(self, kept: dict[Any, Tensor]) -> None:
        super().__init__()
        self.kept, self.at = kept, -1

    def get(self, key: Any, default: Any = None) -> Any:
        self.at += 1
        return self.kept.get((str(self.at),))

    def __setitem__(self, key: Any, value: Tensor) -> None:
        self.kept[str(self.at),] = value


def test_a_loader_that_shuffles_is_as_good_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert holds(false_walks(N_WALKS))
    own = WALK["measure_outputs"]

    def broken(*given: Any, dense_outputs: Any, **how: Any) -> Any:
        return own(*given, dense_outputs=ByPosition(dense_outputs), **how)

    monkeypatch.setitem(WALK, "measure_outputs", broken)
    with pytest.raises(ModelError, match="the output for one input depends"):  # the first look at a batch finds it
        false_walks(N_BROKEN)


# ---- ties

N_RUNS = 4000


def false_epsilons(rule: Callable[[np.ndarray], np.ndarray], seed: int) -> list[bool]:
    """Ratios are 0, 0.1 or 0.2, the last with a share just beyond DELTA: any epsilon below 0.2 is false."""
    rng = np.random.default_rng(seed)
    ratios = rng.choice([0.0, 0.1, 0.2], p=[0.5, 0.5 - BARELY_BAD, BARELY_BAD], size=(N_RUNS, N_POINTS))
    return list(rule(ratios) < 0.2)


def certified(ratios: np.ndarray) -> np.ndarray:
    return certified_epsilon(torch.from_numpy(ratios), DELTA, BETA).numpy()


def tied_count_once(ratios: np.ndarray) -> np.ndarray:
    n_allowed = binomial.k_allowed(N_POINTS, DELTA, BETA)
    return np.array([np.unique(row)[::-1][: n_allowed + 1][-1] for row in ratios])


def test_ties_among_the_ratios() -> None:
    assert holds(false_epsilons(certified, seed=1))
    assert np.mean(false_epsilons(certified, seed=1)) > BETA / 2
    assert not holds(false_epsilons(tied_count_once, seed=1))
