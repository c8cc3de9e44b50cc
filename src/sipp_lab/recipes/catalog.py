"""Loads recipes by name or from a file; a recipe can derive from another with `base:`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sipp.errors import OptionError
from sipp.results.checking import nearest
from sipp.scoring.methods import own_methods
from sipp_lab.own_code import score_digest
from sipp_lab.recipes.schema import OWN, Code, Recipe, check_recipe

BASE_PREFIX = "base"  # files with this prefix only serve as bases
SUFFIX = ".yaml"
SHORT = "short"  # key with the changes for the recipe NAME-short
# Keys that exclude each other: one in a recipe removes those from its base. These names are unique among all sections.
ALTERNATIVES = {
    "keeps": ("alpha", "levels"),
    "alpha": ("keeps",),
    "levels": ("keeps",),
    "milestones": ("every",),
    "every": ("milestones",),
}
MAX_BYTES = 1 << 20  # of a recipe file


def recipe_names() -> list[str]:
    """The names of all built-in recipes."""
    names = [name for name in _file_names() if not name.startswith(BASE_PREFIX)]
    return sorted(names + [f"{name}-{SHORT}" for name in names if _read(name).get(SHORT)])


def recipe_descriptions() -> dict[str, str]:
    """The description of each built-in recipe; they are not validated here, which would import torch."""
    return {name: str(_built_in(name).get("description", "")) for name in recipe_names()}


def load_recipe(name_or_path: str, *, settings: Sequence[str] = (), code: Code | None = None) -> Recipe:
    """Loads a recipe by name or from a .yaml file, and applies `key=value` settings (dotted keys, YAML values).

    `code` names the caller's own network or data, which replace the recipe's. For methods that the caller registered,
    the recipe records a digest of their source.
    """
    if name_or_path.endswith(SUFFIX):
        path, where = Path(name_or_path), name_or_path
        try:
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                raise OSError(f"it is not a plain file of at most {MAX_BYTES:,} bytes")
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot be read as a recipe: {error}", where=path) from error
        values = {"name": path.name.removesuffix(SUFFIX), **_with_base(_parse(text, where), where)}
    else:
        if name_or_path.startswith(BASE_PREFIX):
            raise _unknown(name_or_path)
        values, where = {**_built_in(name_or_path), "name": name_or_path}, f"recipe {name_or_path!r}"
    values = _with_settings(values, settings)
    if "code" in values:
        raise OptionError("'code' is named on the command line only", where=where, fix="use --model, --own-data")
    if code is not None:
        own: dict[str, Any] = {"net": OWN} if code.net is not None else {}
        own |= {"data": {"name": OWN}} if code.data is not None else {}
        values = merge(values, {**own, "code": code.model_dump()})
    return check_recipe(_with_own_methods(values), where=where)


def derived_recipe(values: dict[str, Any], *, where: str, settings: Sequence[str] = ()) -> Recipe:
    """A recipe from values that change a built-in recipe, their `base`; then applies the settings.

    Its name defaults to that of the base.
    """
    recipe = {"name": values.get("base"), **_with_base({"base": None, **values}, where)}
    return check_recipe(_with_own_methods(_with_settings(recipe, settings)), where=where)


def _with_own_methods(values: dict[str, Any]) -> dict[str, Any]:
    """Adds a digest of each user-defined method that the recipe names."""
    prune = values.get("prune")
    named = prune.get("methods") if isinstance(prune, dict) else None
    own = {name: score_digest(row) for name, row in own_methods().items() if isinstance(named, list) and name in named}
    code = {**Code().model_dump(), **(values.get("code") or {}), "methods": own}
    return {**values, "code": code} if own else values


def _file_names() -> list[str]:
    files = resources.files("sipp_lab.recipes").iterdir()
    return sorted(file.name.removesuffix(SUFFIX) for file in files if file.name.endswith(SUFFIX))


def _built_in(name: str) -> dict[str, Any]:
    """The values of a built-in recipe, of its short form, or of a base."""
    if name in _file_names():
        return {key: value for key, value in _read(name).items() if key != SHORT}
    whole = name.removesuffix(f"-{SHORT}")
    short = _read(whole).get(SHORT) if whole in _file_names() and not whole.startswith(BASE_PREFIX) else None
    if not short:
        raise _unknown(name)
    return merge(_built_in(whole), {"description": f"short form of {whole}", **short})


def _unknown(name: str) -> OptionError:
    hint = nearest(name, recipe_names())
    return OptionError(f"unknown recipe {name!r}{hint}", fix=f"`sipp recipes` lists all; or give a {SUFFIX} file")


@cache  # listing all recipes reads each base many times
def _read(name: str) -> dict[str, Any]:
    """The values in a recipe's file over those of its bases, with `short`. Callers must not change them."""
    text = resources.files("sipp_lab.recipes").joinpath(name + SUFFIX).read_text(encoding="utf-8")
    values = _parse(text, f"recipe {name!r}")
    base = values.pop("base", None)
    if base is None:
        return values
    return merge(_read(base) if base in _file_names() else _built_in(base), values)


def _parse(text: str, where: str) -> dict[str, Any]:
    from sipp_lab.recipes.yamlfile import read_yaml  # imported here: listing runs needs no YAML

    values = read_yaml(text, where=where)
    if not isinstance(values, dict):
        raise OptionError(f"a recipe is a mapping of keys to values, not a {type(values).__name__}", where=where)
    return values


def _with_base(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Merges a user's values into those of the built-in recipe that is their base, if they name one."""
    if "base" not in values:
        return values
    base, above = values["base"], {key: value for key, value in values.items() if key != "base"}
    if not isinstance(base, str):
        raise OptionError(f"'base' must be the name of one recipe, not {base!r}", where=where)
    return merge(_built_in(base), above)


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges `above` into `below`, mapping by mapping; a key removes its `ALTERNATIVES`."""
    ended = {other for key in above for other in ALTERNATIVES.get(key, ())} - above.keys()
    values = {key: value for key, value in below.items() if key not in ended}
    for key, value in above.items():
        old = values.get(key)
        values[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return values


def _with_settings(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Applies each `a.b=value`; the result is validated later."""
    from sipp_lab.recipes.yamlfile import read_yaml

    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise OptionError("write key=value, such as train.epochs=10", where=f"--set {setting!r}")
        if parts == ["name"] or parts == ["base"]:
            raise OptionError(
                f"{parts[0]!r} cannot be set", where=f"--set {setting!r}", fix="write a recipe file for that"
            )
        above: Any = read_yaml(text, where=f"--set {key}")
        for part in reversed(parts):
            above = {part: above}
        values = merge(values, above)
    return values
