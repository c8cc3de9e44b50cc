"""SIGTERM and Ctrl-C as a request: the step under way is finished, a checkpoint is saved, then the run ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_BASE = 128  # a process that ends by signal n has the status 128 + n: 130 for Ctrl-C, 143 for SIGTERM

StopSignal = Callable[[], int | None]  # the number of the signal that asked to stop, None if none did


class Interrupted(Exception):
    """A run stopped because a signal asked for it; everything up to the last step is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; run the same command again to resume")
        self.number = number

    @property
    def exit_status(self) -> int:
        return EXIT_BASE + self.number


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """A function that says which signal asked to stop, None if none did. Handlers are given back at the end.

    A second signal finds the original handler: whoever cannot wait for the step to end need not. Handlers can only be
    set in the main thread; elsewhere (and below another handler of the same kind) no signal is looked at.
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
