"""A claim that may be false at some rate: it holds for our rule, and the same simulation catches each broken one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oracles.rates import too_often


@dataclass(frozen=True)
class Claim:
    """`simulate(rule)` says run by run whether what the rule claims is false, which `rate` of the runs may be."""

    simulate: Callable[[Any], Sequence[bool] | np.ndarray]
    rule: Any
    broken: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 0.05

    def is_false_too_often(self, rule: Any) -> bool:
        runs = np.asarray(self.simulate(rule))
        return too_often(int(runs.sum()), len(runs), self.rate)

    def check(self) -> None:
        assert not self.is_false_too_often(self.rule)
        unseen = [name for name, rule in self.broken.items() if not self.is_false_too_often(rule)]
        assert not unseen, f"the simulation does not see what is broken in: {unseen}"
