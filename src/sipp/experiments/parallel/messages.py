"""What a driver on Ray and its tasks tell each other. Its process is there before any other, so it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from sipp.records.schemas import EpochRow


@dataclass
class Messages:
    """What the driver and its tasks tell each other, in a process of its own: new epochs, and the wish to stop."""

    epochs: list[tuple[str, EpochRow]] = field(default_factory=list)
    number: int | None = None

    def add_epoch(self, stage: str, row: EpochRow) -> None:
        self.epochs.append((stage, row))

    def take_epochs(self) -> list[tuple[str, EpochRow]]:
        """The epochs since the last call."""
        taken, self.epochs = self.epochs, []
        return taken

    def stop(self, number: int) -> None:
        self.number = number

    def stop_signal(self) -> int | None:
        return self.number
