"""Options and methods by the names that other libraries have for them, and what to write here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from sipp.errors import UnknownOption

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

REMOVED = ("sparsity", "amount", "ratio", "pruning_ratio", "prune_ratio")  # shares to remove; `keep` is their opposite
KEPT = ("density", "keep_ratio")
SHARES = (*REMOVED, *KEPT)
METHODS = {
    **dict.fromkeys(("l1", "global_magnitude", "threshold"), "magnitude"),
    **dict.fromkeys(("sipp", "default", "auto"), "sipp-blend"),
    "uniform": "random",
    "sensitivity": "sipp-det",
}

# Options of torch.nn.utils.prune, Torch-Pruning, NNI and the like; the option here, which a function has or has not;
# and what to write
ELSEWHERE = (
    (
        (*SHARES, "keep"),
        "multiply_adds",
        "give multiply_adds= or weights=, the share of them to keep: multiply_adds=0.5",
    ),
    (
        ("structured", "structure"),
        "include",
        "single weights are pruned; sipp.shrink(model, data, multiply_adds=0.5) removes whole channels, and "
        "pattern='2:4' keeps 2 of every 4",
    ),
    (("structured", "structure"), "multiply_adds", "whole channels always go here: leave it out"),
    (
        ("ignored_layers", "ignore", "excluded_layers", "skip"),
        "exclude",
        "write exclude=, with names, globs or types of layers: exclude=['head', torch.nn.Conv1d]",
    ),
    (("layers", "parameters", "target_layers"), "include", "write include=, with names, globs or types of layers"),
    (("importance", "criterion", "pruning_method", "score"), "method", "write method=, a name or a function"),
    (("example_inputs", "dataloader", "inputs"), "data", "give the inputs as the second argument, data"),
    (("global_pruning", "is_global"), "include", "layers always share one budget; include= chooses them"),
    (("global_pruning", "is_global"), "uniform", "uniform=True takes the same share of every layer"),
    (("round_to",), "multiple_of", "write multiple_of="),
    (("epsilon",), "method", "sipp.prune_to(model, data, holdout, epsilon=...) prunes as far as a tolerance allows"),
    (("max_accuracy_drop",), "method", "sipp.prune_to(model, data, holdout, max_accuracy_drop=...) does that"),
)
OF_ONE_LAYER = {"l1_unstructured": "magnitude", "random_unstructured": "random"}  # of torch.nn.utils.prune


def explain_unknown_options(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function: an unknown option raises an error that says what to write instead.

    Example:
        >>> from sipp.results.other_names import explain_unknown_options
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
    return next((write for names, option, write in ELSEWHERE if name in names and option in known), "")
