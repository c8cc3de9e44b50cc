"""A frozen dataclass as JSON values, and back: the one way for files, runs, `--json` and the page.

    to_json(pruned)                               # {"method": ..., "layers": [{...}], ...}
    from_json(Pruned, values, "report.json") # the same facts; a DataError names the file and the key

JSON has no infinity and no NaN, so these are the texts "inf", "-inf" and "nan". A field with `metadata=NOT_JSON` is
left out. What is computed from the fields, and useful to somebody who reads the file, is named in the class attribute
`ALSO_IN_JSON`: it is written, but not read. Unknown keys are ignored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sipp.errors import DataError

NOT_JSON = {"json": False}
NOT_FINITE = ("inf", "-inf", "nan")


def to_json(value: Any) -> Any:
    """The value in JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.metadata.get("json", True)]
        return {name: to_json(getattr(value, name)) for name in (*names, *getattr(value, "ALSO_IN_JSON", ()))}
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return [to_json(inner) for inner in sorted(value)]
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def from_json(cls: Any, values: Any, where: object) -> Any:
    """The inverse of `to_json`; a DataError says `where` the values come from, which key is wrong, and how."""
    try:
        return _read(cls, values, "")
    except _WrongValue as wrong:
        raise DataError(str(wrong), where=where) from wrong


class _WrongValue(ValueError):
    pass


def _read(kind: Any, value: Any, key: str) -> Any:
    """The value as an instance of this type."""
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _read(of[0], value, key)
    if origin in (Union, UnionType):
        return _read_one_of(of, value, key)
    if origin is Literal:
        return _checked(value in of, f"one of {', '.join(map(repr, of))}", value, key)
    if origin in (tuple, list, frozenset):
        _checked(isinstance(value, list | tuple), "a list", value, key)
        kinds = of if origin is tuple and of[-1:] != (...,) else of[:1] * len(value)
        _checked(len(kinds) == len(value), f"a list of {len(kinds)}", value, key)
        return origin(_read(inner, one, f"{key}.{i}") for i, (inner, one) in enumerate(zip(kinds, value)))
    if origin in (dict, Mapping):
        _checked(isinstance(value, dict), "an object", value, key)
        return {name: _read(of[1], inner, f"{key}.{name}") for name, inner in value.items()}
    if is_dataclass(kind):
        return _read_record(kind, value, key)
    if kind is float and value in NOT_FINITE:
        return float(value)
    if kind is Path:
        return Path(_checked(isinstance(value, str), "text", value, key))
    plain, words = _PLAIN[kind]
    value = _checked(isinstance(value, plain) and (kind is bool) == isinstance(value, bool), words, value, key)
    return float(value) if kind is float else value


_PLAIN: dict[Any, tuple[Any, str]] = {
    str: (str, "text"),
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    dict: (dict, "an object"),
    NoneType: (NoneType, "null"),
}


def _read_record(kind: Any, value: Any, key: str) -> Any:
    """The object as a record of this dataclass."""
    _checked(isinstance(value, dict), "an object", value, key)
    types, found = _types_of(kind), {}
    for field in fields(kind):
        if field.name in value and field.metadata.get("json", True):
            found[field.name] = _read(types[field.name], value[field.name], f"{key}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _WrongValue(f"{_key_words(f'{key}.{field.name}')} is missing")
    return kind(**found)


def _read_one_of(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    """The value as the first of these types that it fits; of records, one whose keys are all there."""
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    problem = None
    for kind in [kind for kind in others if isinstance(value, dict) and _needed(kind) <= value.keys()] or others:
        try:
            return _read(kind, value, key)
        except _WrongValue as wrong:
            problem = wrong
    assert problem is not None
    raise problem


@functools.cache
def _needed(kind: Any) -> frozenset[str]:
    """The keys that a record of this dataclass must have."""
    without = [field for field in fields(kind) if field.default is MISSING] if is_dataclass(kind) else []
    return frozenset(field.name for field in without if field.default_factory is MISSING)


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _checked(is_right: bool, wanted: str, value: Any, key: str) -> Any:
    if is_right:
        return value
    found = "" if isinstance(value, dict | list) else f", found {value!r:.60}"
    raise _WrongValue(f"{_key_words(key)} must be {wanted}{found}")


def _key_words(key: str) -> str:
    """'kept' in layers.0, for the key .layers.0.kept."""
    outer, _, last = key.lstrip(".").rpartition(".")
    return f"{last!r} in {outer}" if outer else f"{last!r}" if last else "it"
