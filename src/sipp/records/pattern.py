"""An n:m pattern: of every m consecutive weights of a row at most n are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sipp.errors import OptionError

MOST_GROUP = 2**20
_FORM = re.compile(r"([0-9]{1,7}):([0-9]{1,7})", re.ASCII)


@dataclass(frozen=True)
class Pattern:
    """n of every m consecutive weights."""

    n: int
    m: int

    def kept(self, fan_in: int) -> int:
        """How many weights a row of this fan-in keeps."""
        return fan_in // self.m * self.n + min(self.n, fan_in % self.m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


def pattern_of(text: Any) -> Pattern:
    """The pattern that "2:4" names; an OptionError where it names none."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    n, m = (int(found.group(1)), int(found.group(2))) if found is not None else (0, 0)
    if not 1 <= n <= m <= MOST_GROUP:
        raise OptionError(
            f"pattern={text!r:.60} is not a pattern n:m with 1 <= n <= m",
            fix="give for example pattern='2:4': two of every four weights are kept",
            option="pattern",
        )
    return Pattern(n, m)
