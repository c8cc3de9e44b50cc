"""Arguments of public functions: each check gives the value in its plain type, or an OptionError that names it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from sipp.errors import OptionError

MOST_SEED = 2**63 - 1  # what every generator takes


def check_number(name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf) -> float:
    """The value as a finite float of at least `least` and greater than `above`."""
    wanted = f"greater than {above:g}" if above > -math.inf else f"of at least {least:g}" if least > -math.inf else ""
    if not _is(value, numbers.Real) or not math.isfinite(value) or value < least or value <= above:
        raise OptionError(f"{name}={value!r:.60} must be a finite number {wanted}".rstrip(), option=name)
    return float(value)


def check_share(name: str, value: Any) -> float:
    """The value as a float, if it lies strictly between 0 and 1."""
    if not _is(value, numbers.Real) or not 0.0 < value < 1.0:
        raise OptionError(
            f"{name}={value!r:.60} must lie strictly between 0 and 1",
            fix=f"for example {name}=0.05 or {name}=0.95",
            option=name,
        )
    return float(value)


def check_whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """The value as an int from `least` to `most`."""
    if not _is(value, numbers.Integral) or value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise OptionError(f"{name}={value!r:.60} must be a whole number {limit}", option=name)
    return int(value)


def check_seed(seed: Any) -> int:
    """The seed as an int that every random generator takes."""
    return check_whole("seed", seed, least=0, most=MOST_SEED)


def check_flag(name: str, value: Any) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r:.60} must be True or False", option=name)
    return value


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """The value, if it is one of the allowed words."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise OptionError(f"{name}={value!r:.60} is not one of {', '.join(words)}", option=name)
    return value


def check_record(name: str, value: Any, kind: type) -> None:
    """Refuses what is not a record of this kind."""
    if not isinstance(value, kind):
        raise OptionError(f"{name}={value!r:.60} is not a sipp.{kind.__name__}; give sipp.{kind.__name__}(...)")


def _is(value: Any, kind: type) -> bool:
    """Whether the value is a number of this kind; a bool counts as none, and a tensor is not taken for one."""
    return isinstance(value, kind) and not isinstance(value, bool)
