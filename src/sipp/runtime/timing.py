"""How long something takes: alone on one thread, or in turns with what it has to beat."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

TRIALS = 3
MOST_TRIALS, LEAST_SECONDS = 50, 0.003
TURNS, RACE_SECONDS = 6, 0.2  # for the whole network, sparse against dense
MOST_TIME = 0.95  # sparse is used if it takes at most this share of the dense time
MS = 1e3  # milliseconds in a second


def best_time(function: Callable[[], object], trials: int = TRIALS, limit: float = math.inf) -> float:
    """The shortest of a few runs in seconds of CPU time; short functions are run more often.

    Uses one thread and counts only its own CPU time, so other programs hardly disturb it. Meanwhile torch has one
    thread for the whole process, whatever else runs there. Stops after a run that takes more than `limit`.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best, spent, n_runs = math.inf, 0.0, 0
        while n_runs <= trials or (spent < LEAST_SECONDS and n_runs < MOST_TRIALS):
            start = time.thread_time()
            function()
            seconds = time.thread_time() - start
            best, spent, n_runs = min(best, seconds), spent + seconds, n_runs + 1
            if best > limit:
                break
    finally:
        torch.set_num_threads(n_threads)
    return best


def dense_time(function: Callable[[], object], trials: int = TRIALS) -> float:
    """The time of torch's dense implementation, which every sparse one must beat."""
    return best_time(function, trials)


def is_enough_faster(seconds: float, dense_seconds: float) -> bool:
    """Whether something sparse, a layer or a network, is enough faster than torch's dense one to be used."""
    return seconds <= MOST_TIME * dense_seconds


def race(fast: Callable[[], object], dense: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Wall times of both on all of torch's threads, in alternation, so that noise affects both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < TURNS or (sum(map(sum, times)) < RACE_SECONDS and len(times[0]) < MOST_TRIALS):
        for taken, function in zip(times, (fast, dense)):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return times
