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
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sipp.errors import DataError

NOT_JSON = {"json": False}
NOT_FINITE = ("inf", "-inf", "nan")


def to_json(value: Any, *, only_fields: bool = False) -> Any:
    """The value in JSON types; with `only_fields`, without what is computed from them."""
    inner_json = partial(to_json, only_fields=only_fields)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.metadata.get("json", True)]
        names += [] if only_fields else getattr(value, "ALSO_IN_JSON", ())
        return {name: inner_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): inner_json(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return [inner_json(inner) for inner in sorted(value)]
    if isinstance(value, list | tuple):
        return [inner_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def from_json(cls: Any, values: Any, where: object) -> Any:
    """The inverse of `to_json`; a DataError says `where` the values come from, and which key is missing or wrong."""
    return _read(cls, values, "", where)


def _read(kind: Any, value: Any, key: str, where: object) -> Any:
    """The value as an instance of this type."""
    origin, of = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return _read(of[0], value, key, where)
    if origin in (Union, UnionType):
        return None if value is None and NoneType in of else _read(_one_of(of, value), value, key, where)
    if is_dataclass(origin):
        return _read_record(kind, value, key, where)
    if origin in (tuple, frozenset):
        _checked(isinstance(value, list | tuple), "a list", value, key, where)
        kinds = of if origin is tuple and of[-1] is not Ellipsis else of[:1] * len(value)
        _checked(len(kinds) == len(value), f"a list of {len(kinds)}", value, key, where)
        return origin(_read(inner, one, f"{key}.{i}", where) for i, (inner, one) in enumerate(zip(kinds, value)))
    if origin in (dict, Mapping):
        _checked(isinstance(value, dict), "an object", value, key, where)
        return {name: _read(of[1], inner, f"{key}.{name}", where) for name, inner in value.items()} if of else value
    if origin is Literal:
        return _checked(value in of, f"one of {', '.join(map(repr, of))}", value, key, where)
    if kind is float and value in NOT_FINITE:
        return float(value)
    plain, wanted = PLAIN.get(kind, (object, ""))
    value = _checked(isinstance(value, plain) and (kind is bool or value is not True), wanted, value, key, where)
    return kind(value) if kind in (float, Path) else value


PLAIN: dict[Any, tuple[Any, str]] = {
    str: (str, "text"),
    Path: (str, "text"),
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
}


def _read_record(kind: Any, value: Any, key: str, where: object) -> Any:
    """The object as a record of this dataclass."""
    _checked(isinstance(value, dict), "an object", value, key, where)
    types, found = _types_of(kind), {}
    for field in fields(kind):
        if field.name in value and field.metadata.get("json", True):
            found[field.name] = _read(types[field.name], value[field.name], f"{key}.{field.name}", where)
        elif field.name in _needed(kind):
            raise DataError(f"{_key_words(f'{key}.{field.name}')} is missing", where=where)
    return kind(**found)


def _one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    """The first of these types that the value may be; of records, one whose keys are all there."""
    others = [kind for kind in kinds if kind is not NoneType]
    for kind in others:
        if is_dataclass(kind) and isinstance(value, dict) and _needed(kind) <= value.keys():
            return kind
        if kind in PLAIN and isinstance(value, PLAIN[kind][0]):
            return kind
    return others[0]


def _needed(kind: Any) -> frozenset[str]:
    """The keys that a record of this dataclass must have."""
    return frozenset(field.name for field in fields(kind) if field.default is field.default_factory is MISSING)


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _checked(is_right: bool, wanted: str, value: Any, key: str, where: object) -> Any:
    if is_right:
        return value
    found = "" if isinstance(value, dict | list) else f", found {value!r:.60}"
    raise DataError(f"{_key_words(key)} must be {wanted}{found}", where=where)


def _key_words(key: str) -> str:
    """'kept' in layers.0, for the key .layers.0.kept."""
    outer, _, last = key.lstrip(".").rpartition(".")
    return f"{last!r} in {outer}" if outer else f"{last!r}" if last else "it"
