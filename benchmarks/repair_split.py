"""Splits the seconds of a repair by what they were spent on, without a profiler.

A mark is set where a part of the work begins or ends. On a GPU it is an event in the queue, so that nothing waits for
it: a part's seconds are those in which the GPU worked for it, or waited for Python to ask for more of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from sipp.repairing import data_split, fit, parts, sums, walk
from sipp.verbs import prune, record

OTHER = "the rest"
PARTS: dict[str, list[tuple[Any, str]]] = {
    "scores": [(prune, "rank")],
    "cut": [(prune, "cut"), (prune, "measured_change"), (record, "cut_of"), (prune, "pruned_of")],
    "passes": [(parts.Part, "run")],
    "sums": [(sums.WeightSums, "add")],
    "search": [(fit, "search")],
    "fit": [(walk, "fit_layer")],
    "validation and test": [(module, "output_error") for module in (walk, data_split)],
}


class Split:
    """The marks of one repair."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")
        self.under_way = [OTHER]
        self.notes: list[tuple[str, Any]] = []  # which part ends here, and when

    def mark(self) -> None:
        """Ends the part under way."""
        now: Any = time.perf_counter()
        if self.is_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.notes.append((self.under_way[-1], now))

    def within(self, part: str, own: Callable[..., Any]) -> Callable[..., Any]:
        """The function; what it takes, without the parts inside it, counts for this part."""

        def marked(*args: Any, **options: Any) -> Any:
            self.mark()
            self.under_way.append(part)
            try:
                return own(*args, **options)
            finally:
                self.mark()
                self.under_way.pop()

        return marked

    def seconds(self) -> dict[str, float]:
        """Seconds by part, in the order in which the parts are listed."""
        if self.is_cuda:
            torch.cuda.synchronize()
        found: Counter[str] = Counter()
        for (_, before), (part, now) in zip(self.notes, self.notes[1:]):
            found[part] += before.elapsed_time(now) / 1000 if self.is_cuda else now - before
        return {part: found[part] for part in (*PARTS, OTHER) if found[part]}

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds().items())


@contextmanager
def splitting(device: str) -> Iterator[Split]:
    """A context in which the parts of repairs are marked."""
    split = Split(device)
    with ExitStack() as stack:
        for part, places in PARTS.items():
            for owner, name in places:
                stack.enter_context(mock.patch.object(owner, name, split.within(part, getattr(owner, name))))
        split.mark()
        yield split
        split.mark()
