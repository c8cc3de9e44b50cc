"""Turns SIGTERM and Ctrl-C into a request: finish the current step, save a checkpoint, then stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_BASE = 128  # exit status of a process ended by signal n is 128 + n: 130 for Ctrl-C, 143 for SIGTERM

StopSignal = Callable[[], int | None]  # the signal that requested a stop, or None


class Interrupted(Exception):
    """A run was stopped by a signal; everything up to the last step is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; run the same command again to resume")
        self.number = number

    @property
    def exit_status(self) -> int:
        return EXIT_BASE + self.number


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Yields a function that returns the signal that requested a stop, or None. Restores the handlers at the end.

    A second signal reaches the original handler, so one can stop without waiting for the step. Handlers can only be set
    in the main thread; elsewhere signals are ignored.
    """
    asked: list[int] = []
    originals: dict[int, Any] = {}

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, originals[number])

    try:
        try:
            for number in SIGNALS:
                originals[number] = signal.signal(number, on_signal)
        except ValueError:  # not the main thread
            pass
        yield lambda: asked[0] if asked else None
    finally:
        for restored, handler in originals.items():
            signal.signal(restored, handler)
