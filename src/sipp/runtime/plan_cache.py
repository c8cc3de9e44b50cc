"""What was compiled, one `Compiled` for each input signature, and which are kept."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sipp.runtime.steps import Step

MOST_PLANS = 8  # kept at a time
PATIENCE = 16  # calls with a new signature, while the least recently used plan is idle, before it is replaced
MOST_WAITING = 256  # signatures without a plan whose calls are counted
TOO_MANY = (
    f"more than {MOST_PLANS} kinds of input (shapes, or numbers among the arguments): torch runs the others, dense; "
    "pad inputs to fewer shapes, and pass numbers that change as tensors"
)


@dataclass(frozen=True)
class Compiled:
    """How inputs of one signature are run: step by step, or by torch as a whole if that is faster."""

    steps: list[Step]  # of what was tried, without weights, if torch runs the network
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    is_dense: bool
    how: str  # in words
    seconds: float  # of a call
    dense_seconds: float
    speed: str  # in words, against torch, when it was compiled
    one_thread_seconds: float | None = None  # of a call on one thread; None: there is only one, or torch runs it
    chunk: int | None = None  # points per run of the steps; None: all at once
    tensors: Sequence[Tensor] = ()  # that it holds; others and the model may share them
    n_packed_bytes: int = 0  # of packed weights that are not among them
    n_buffer_bytes: int = 0  # of activations


def left_to_torch(run: Callable[[tuple[Any, ...], dict[str, Any]], Any], how: str, seconds: float) -> Compiled:
    """A network of which no step is known: torch runs it as it is called."""
    return Compiled([], run, True, how, seconds, seconds, "run by torch: nothing gained")


class PlanCache:
    """At most MOST_PLANS plans by input signature, protected by a lock.

    A further signature replaces the least recently used plan only after PATIENCE calls during which that plan was not
    used, so signatures that alternate do not evict each other.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.has_overflowed = False  # whether a signature ever got no plan
        self._plans: dict[Hashable, Compiled] = {}  # least recently used first
        self._waiting: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def all(self) -> list[Compiled]:
        return list(self._plans.values())

    def plan_for(self, signature: Hashable, make: Callable[[], Compiled]) -> Compiled | None:
        """The plan for this signature, compiled now if it gets one; None: torch runs it (warns once)."""
        with self.lock:
            known = self.used(signature)
            is_next = known is None and self.should_compile(signature)
        if is_next:
            return make()
        if known is None and not self.has_overflowed:
            self.has_overflowed = True
            warnings.warn(TOO_MANY, stacklevel=3)
        return known

    def used(self, signature: Hashable) -> Compiled | None:
        """The plan for this signature, marked as most recently used; None if there is none."""
        if signature not in self._plans:
            return None
        if signature == next(iter(self._plans)):
            self._waiting.clear()
        self._plans[signature] = self._plans.pop(signature)
        return self._plans[signature]

    def should_compile(self, signature: Hashable) -> bool:
        """Counts a call with a signature that has no plan; whether it should get one now."""
        if len(self._plans) < MOST_PLANS:
            return True
        if len(self._waiting) == MOST_WAITING and signature not in self._waiting:
            self._waiting.clear()
        self._waiting[signature] = self._waiting.get(signature, 0) + 1
        return self._waiting[signature] >= PATIENCE

    def put(self, signature: Hashable, compiled: Compiled) -> None:
        if len(self._plans) == MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._waiting.clear()
        self._plans[signature] = compiled
