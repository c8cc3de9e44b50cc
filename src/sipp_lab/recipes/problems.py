"""What pydantic finds wrong with a recipe, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WANTED = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dataclass_type": "must be an object",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "string_pattern_mismatch": "does not have the form {pattern}",
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be greater than {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be less than {lt:g}",
    "literal_error": "must be one of {expected}",
    "too_short": "must hold at least {min_length}",
    "extra_forbidden": "is not known here",
}


def problem_words(problem: Mapping[str, Any]) -> str:
    """One entry of a ValidationError's `errors()` as a plain sentence: which key, what it must be, what it is."""
    kind, context = problem["type"], problem.get("ctx", {})
    key = _key_words(problem["loc"])
    if kind == "missing":
        return f"{key} is missing"
    if kind == "value_error":  # a check of our own, which has its own words
        return f"{key}: {context['error']}" if problem["loc"] else str(context["error"])
    wanted = _WANTED[kind].format(**context) if kind in _WANTED else problem["msg"]
    value = problem["input"]
    return f"{key} {wanted}" + ("" if isinstance(value, dict) else f", found {value!r:.60}")


def _key_words(path: tuple[int | str, ...]) -> str:
    """'kept' in layers.0, for the path ("layers", 0, "kept"); places in a list go with their list."""
    n_last = next((n for n, part in enumerate(reversed(path), start=1) if isinstance(part, str)), len(path))
    outer, last = (".".join(map(str, part)) for part in (path[: len(path) - n_last], path[len(path) - n_last :]))
    return f"{last!r} in {outer}" if outer else f"{last!r}" if last else "the whole"
