"""Checks the arguments of public functions: each returns the value, or raises an OptionError that names it."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from sipp.errors import OptionError, UnknownOption

MOST_SEED = 2**63 - 1  # what every generator takes
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([KMGT]?B|[KMGT]IB)", re.IGNORECASE | re.ASCII)
_UNITS = (
    {"B": 1}
    | {f"{k}B": 1000**n for n, k in enumerate("KMGT", 1)}
    | {f"{k}IB": 1024**n for n, k in enumerate("KMGT", 1)}
)


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
            fix=fix or f"for example {name}=0.05 or {name}=0.95",
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
        raise OptionError(f"{name} is a {type(value).__name__}", fix=fix, option=name)
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


def size(name: str, value: Any) -> int:
    """The number of bytes that a size such as "5GB" means, or the number itself."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    n_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match is not None else value
    if not _is(n_bytes, int) or n_bytes < 1:
        raise OptionError(f"{name}={value!r:.40} is not a size", fix="give '5GB', or a number of bytes", option=name)
    return int(n_bytes)


def _is(value: Any, kind: type) -> bool:
    """Whether the value is a number of this kind; bools and tensors are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


# --- Options and methods by the names that other libraries have for them ----------------------------------------------

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

REMOVED = ("sparsity", "amount", "ratio", "pruning_ratio", "prune_ratio")  # shares to remove; `keep` is their opposite
KEPT = ("density", "keep_ratio")
SHARES = (*REMOVED, *KEPT)
TOLERANCES = ("epsilon", "max_accuracy_drop")
METHODS = {
    **dict.fromkeys(("l1", "global_magnitude", "threshold"), "magnitude"),
    **dict.fromkeys(("sipp", "default", "auto"), "sipp-blend"),
    "uniform": "random",
    "sensitivity": "sipp-det",
}

ELSEWHERE = {  # options of torch.nn.utils.prune, Torch-Pruning, NNI and the like
    **dict.fromkeys(
        ("structured", "structure"),
        "single weights are pruned; sipp.shrink removes channels whose weights are all gone, pattern='2:4' keeps 2 of "
        "every 4",
    ),
    **dict.fromkeys(
        ("ignored_layers", "ignore", "excluded_layers", "skip"),
        "write exclude=, with names, globs or types of layers: exclude=['head', torch.nn.Conv1d]",
    ),
    **dict.fromkeys(("layers", "parameters", "target_layers"), "write include=, with names, globs or types of layers"),
    **dict.fromkeys(("importance", "criterion", "pruning_method", "score"), "write method=, a name or a function"),
    **dict.fromkeys(("example_inputs", "dataloader", "inputs"), "give the inputs as the second argument, data"),
    **dict.fromkeys(("global_pruning", "is_global"), "layers always share one budget; include= chooses them"),
}
OF_ONE_LAYER = {"l1_unstructured": "magnitude", "random_unstructured": "random"}  # of torch.nn.utils.prune


def explain_unknown_options(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function: an unknown option raises an error that says what to write instead.

    Example:
        >>> from sipp.results.check import explain_unknown_options
        >>> @explain_unknown_options
        ... def prune(*, keep): ...
        >>> prune(sparsity=0.9)
        Traceback (most recent call last):
        sipp.errors.UnknownOption: prune has no option sparsity; sparsity=0.9 is keep=0.1
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        for name, value in options.items():
            if name not in known and (fix := _how_to_write(name, value, known)):
                raise UnknownOption(f"{function.__name__} has no option {name}", fix=fix, option=name)
        return function(*args, **options)

    return checked


def method_here(name: str) -> tuple[str, str] | None:
    """Our name for a method of another library, and what to write; None if it is unknown."""
    plain = name.lower().replace("-", "_")
    if (here := OF_ONE_LAYER.get(plain)) is not None:
        what = f"{here!r} of one layer here; {here!r} alone compares the weights of all layers"
        return what, f"give method={here!r}, include='LAYER.weight'; without include= for all layers together"
    here = METHODS.get(plain)
    return None if here is None else (f"called {here!r} here", f"give method={here!r}")


def _how_to_write(name: str, value: Any, known: Any) -> str:
    """What to write instead of an unknown option; empty if there is no suggestion."""
    keep = "keep" if "keep" in known else "keeps" if "keeps" in known else ""
    if keep and name in SHARES:
        what = "the share of weights to keep" + ("" if name in KEPT else ", not the share to remove")
        is_share = isinstance(value, Real) and not isinstance(value, Integral) and 0 < float(value) < 1
        if not is_share:
            return f"give {keep}=, {what}"
        share = f"{float(value) if name in KEPT else 1 - float(value):.6g}"
        return f"{name}={value!r:.60} is {keep}={share if keep == 'keep' else f'({share},)'}"
    if name in ELSEWHERE and "include" in known:
        return ELSEWHERE[name]
    if name in TOLERANCES and "method" in known:
        return f"sipp.prune_to(model, data, holdout, {name}=...) prunes as far as a tolerance allows"
    return ""
