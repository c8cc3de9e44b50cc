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
        "single weights are pruned; sipp.shrink(model, data, multiply_adds=0.5) removes whole channels, and "
        "pattern='2:4' keeps 2 of every 4",
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
OF_SHRINK = {"round_to": "multiple_of"}
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
    if "multiply_adds" in known and name in (*SHARES, "keep"):
        return "give multiply_adds= or weights=, the share of them to keep: multiply_adds=0.5"
    if name in OF_SHRINK and OF_SHRINK[name] in known:
        return f"write {OF_SHRINK[name]}="
    if name in ELSEWHERE and ("include" in known or "exclude=" in ELSEWHERE[name]):
        return ELSEWHERE[name]
    if name in TOLERANCES and "method" in known:
        return f"sipp.prune_to(model, data, holdout, {name}=...) prunes as far as a tolerance allows"
    return ""
