"""Options and methods as other libraries call them: what is unknown here is refused with the name it has here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from sipp.errors import UnknownOption

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

REMOVED = ("sparsity", "amount", "ratio", "pruning_ratio", "prune_ratio")  # what goes; `keep` is what stays
KEPT = ("density", "keep_ratio")
SHARES = (*REMOVED, *KEPT)
RECORDS = {
    **dict.fromkeys(("loss", "n_points", "norm_stats", "kernel", "chunk_bytes"), ("scoring", "Scoring")),
    **dict.fromkeys(("c_constant", "k_constant"), ("constants", "Constants")),
}
TOLERANCES = ("epsilon", "max_accuracy_drop")
METHODS = {
    **dict.fromkeys(("magnitude", "l1", "global_magnitude", "threshold"), "wt"),
    **dict.fromkeys(("sipp", "default", "auto"), "sipp-blend"),
    "uniform": "random",
    "sensitivity": "sipp-det",
}

OF_ONE_LAYER = {"l1_unstructured": "wt", "random_unstructured": "random"}  # of torch.nn.utils.prune


def in_our_words(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The same function, which says of an option that it does not have what to write instead.

    Example:
        >>> from sipp.records.other_names import in_our_words
        >>> @in_our_words
        ... def prune(*, keep): ...
        >>> prune(sparsity=0.9)
        Traceback (most recent call last):
        sipp.errors.UnknownOption: prune has no option sparsity; sparsity=0.9 is keep=0.1
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        for name, value in options.items():
            if name not in known and (fix := _here(name, value, known)):
                raise UnknownOption(f"{function.__name__} has no option {name}", fix=fix, option=name)
        return function(*args, **options)

    return checked


def method_here(name: str) -> tuple[str, str] | None:
    """What a method of this name is called here, and what to write; None where no other name is known."""
    plain = name.lower().replace("-", "_")
    if (here := OF_ONE_LAYER.get(plain)) is not None:
        what = f"{here!r} of one layer here; {here!r} alone compares the weights of all layers"
        return what, f"give method={here!r}, include='LAYER.weight'; without include= for all layers together"
    here = METHODS.get(plain)
    return None if here is None else (f"called {here!r} here", f"give method={here!r}")


def _here(name: str, value: Any, known: Any) -> str:
    """How it is written here; empty where that is not known."""
    keep = "keep" if "keep" in known else "keeps" if "keeps" in known else ""
    if keep and name in SHARES:
        what = "the share of weights to keep" + ("" if name in KEPT else ", not the share to remove")
        is_share = isinstance(value, Real) and not isinstance(value, Integral) and 0 < float(value) < 1
        if not is_share:
            return f"give {keep}=, {what}"
        share = f"{float(value) if name in KEPT else 1 - float(value):.6g}"
        return f"{name}={value!r:.60} is {keep}={share if keep == 'keep' else f'({share},)'}"
    record, kind = RECORDS.get(name, ("", ""))
    if record in known:
        return f"write {record}=sipp.{kind}({name}=...)"
    if name in TOLERANCES and "method" in known:
        return f"sipp.prune_to(model, data, holdout, {name}=...) prunes as far as a tolerance allows"
    return ""
