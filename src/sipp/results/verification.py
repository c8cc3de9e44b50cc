"""The result of `verify`: whether a certificate holds, and what could not be checked."""

from __future__ import annotations

from dataclasses import dataclass

from sipp.results.html import text_html, view


@dataclass(frozen=True)
class Verification:
    """The outcome of checking a certificate: whether it holds, what differs, and what could not be checked."""

    ok: bool
    reasons: tuple[str, ...]  # what differs from the networks, the points, the calibration or the ledger
    unchecked: tuple[str, ...]  # what the certificate says and nothing here can confirm

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = ["verified" if self.ok else "not verified:", *self.reasons]
        return "\n".join(lines + [f"not checked: {text}" for text in self.unchecked])

    def _repr_html_(self) -> str:
        title, *lines = str(self).splitlines()
        return view(title, *map(text_html, lines))
