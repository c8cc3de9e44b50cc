"""Checks the arguments of public functions: each returns the value, or raises an OptionError that names it."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sipp.errors import OptionError

MOST_SEED = 2**63 - 1  # what every generator takes


def number(
    name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """The value as a finite float of at least `least`, greater than `above` and smaller than `below`."""
    limits = ((least, "of at least"), (above, "greater than"), (below, "below"))
    wanted = " and ".join(f"{words} {limit:g}" for limit, words in limits if math.isfinite(limit))
    if not (_is(value, numbers.Real) and math.isfinite(value) and least <= value and above < value < below):
        raise OptionError(f"{name}={value!r:.60} must be a finite number {wanted}".rstrip(), option=name)
    return float(value)


def share(name: str, value: Any, fix: str = "") -> float:
    """The value as a float, if it lies strictly between 0 and 1."""
    if not _is(value, numbers.Real) or not 0.0 < value < 1.0:
        raise OptionError(
            f"{name}={value!r:.60} must lie strictly between 0 and 1",
            fix=fix or f"give a share, for example {name}=0.5",
            option=name,
        )
    return float(value)


def keep(name: str, value: Any) -> float:
    """The value as a float, if it is a share of weights to keep, in (0, 1]."""
    if not _is(value, numbers.Real) or not 0.0 < value <= 1.0:
        raise OptionError(
            f"{name}={value!r:.60} is not in (0, 1]",
            fix="give the share of prunable weights to keep: 0.15 keeps 15 %",
            option=name,
        )
    return float(value)


def whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """The value as an int from `least` to `most`."""
    if not _is(value, numbers.Integral) or value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise OptionError(f"{name}={value!r:.60} must be a whole number {limit}", option=name)
    return int(value)


def seed(name: str, value: Any) -> int:
    """The seed as an int that every random generator takes."""
    return whole(name, value, least=0, most=MOST_SEED)


def flag(name: str, value: Any) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r:.60} must be True or False", option=name)
    return value


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """The value, if it is one of the allowed words."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise OptionError(f"{name}={value!r:.60} is not one of {', '.join(words)}", option=name)
    return value


def kind(name: str, value: Any, kinds: Any, fix: str) -> Any:
    """The value, if it is an instance of one of these classes."""
    if not isinstance(value, kinds):
        wanted = " or ".join(one.__name__ for one in get_args(kinds) or (kinds,))
        raise OptionError(f"{name} must be a {wanted}, not a {type(value).__name__}", fix=fix, option=name)
    return value


def fields_of(record: Any) -> None:
    """Checks the fields of a frozen dataclass by their annotations: literals, flags, and functions of (name, value).

    What a function returns is the field's value from then on.
    """
    for name, hint in _hints_of(record.__class__).items():
        value = getattr(record, name)
        typ, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kinds = get_args(typ) if get_origin(typ) in (Union, UnionType) else (typ,)
        if value is None and NoneType in kinds:
            continue
        if get_origin(kinds[0]) is Literal:
            choice(name, value, get_args(kinds[0]))
        elif typ is bool:
            flag(name, value)
        for note in notes:
            if callable(note):
                object.__setattr__(record, name, note(name, value))


@functools.cache
def _hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def nearest(name: object, known: Iterable[str]) -> str:
    """' (did you mean x?)' for an unknown name; empty if no known name is close."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1) if isinstance(name, str) else []
    return f" (did you mean {near[0]!r}?)" if near else ""


def path(name: str, value: Any, example: str) -> Path:
    """The value as a Path."""
    if not isinstance(value, (str, PathLike)) or not str(value) or "\0" in str(value):
        raise OptionError(f"{name}={value!r:.80} is not a path", fix=f"give one such as {example!r}")
    return Path(value)


def _is(value: Any, kind: type) -> bool:
    """Whether the value is a number of this kind; bools and tensors are not."""
    return isinstance(value, kind) and not isinstance(value, bool)
