"""The result of `verify`: whether a certificate holds, and what could not be checked."""

from __future__ import annotations

from dataclasses import dataclass

from sipp.results.sheet import Sheet, shown


@dataclass(frozen=True)
@shown
class Verification:
    """The outcome of checking a certificate: whether it holds, what differs, and what could not be checked."""

    ok: bool
    reasons: tuple[str, ...]  # what differs from the networks, the points, the calibration or the ledger
    unchecked: tuple[str, ...]  # what the certificate says and nothing here can confirm

    def __bool__(self) -> bool:
        return self.ok

    @property
    def sheet(self) -> Sheet:
        facts = [("differs", reason) for reason in self.reasons]
        facts += [("not checked", text) for text in self.unchecked]
        return Sheet("verified" if self.ok else "not verified", tuple(facts))
