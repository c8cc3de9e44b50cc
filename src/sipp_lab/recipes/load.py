"""Loads recipes by name or from a YAML file that changes one (`base:`), and applies settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sipp
from sipp.errors import OptionError
from sipp.extras import needed_for
from sipp.results import check
from sipp_lab.own_code import score_digest
from sipp_lab.recipes.merging import merge
from sipp_lab.recipes.schema import OWN, Code, Recipe, check_recipe
from sipp_lab.recipes.table import RECIPES, values_of

SUFFIX = ".yaml"


def recipe_names() -> list[str]:
    """The names of all built-in recipes."""
    return list(RECIPES)


def load_recipe(name_or_path: str, *, settings: Sequence[str] = (), code: Code | None = None) -> Recipe:
    """Loads a recipe by name or from a .yaml file, and applies `key=value` settings (dotted keys, YAML values).

    `code` names the caller's own network or data, which replace the recipe's. For methods that the caller registered,
    the recipe records a digest of their source.
    """
    if not name_or_path.endswith(SUFFIX):
        values, where = {**_built_in(name_or_path), "name": name_or_path}, f"recipe {name_or_path!r}"
        return _checked(values, settings, where, code)
    path = Path(name_or_path)
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise OptionError("cannot be read as a recipe: it is not a file", where=path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot be read as a recipe: {error}", where=path) from error
    values = read_yaml(text, where=name_or_path)
    if not isinstance(values, dict):
        raise OptionError(f"a recipe is a mapping of keys to values, not a {type(values).__name__}", where=path)
    return recipe_of(
        {"name": path.name.removesuffix(SUFFIX), **values}, where=name_or_path, settings=settings, code=code
    )


def recipe_of(
    values: Mapping[str, Any], *, where: str, settings: Sequence[str] = (), code: Code | None = None
) -> Recipe:
    """The recipe with these values over those of the built-in recipe that is its `base`, if it names one."""
    above = {key: value for key, value in values.items() if key != "base"}
    if "base" in values:
        if not isinstance(values["base"], str):
            raise OptionError(f"'base' must be the name of one recipe, not {values['base']!r}", where=where)
        above = merge({"name": values["base"], **_built_in(values["base"])}, above)
    return _checked(above, settings, where, code)


def _checked(values: dict[str, Any], settings: Sequence[str], where: str, code: Code | None) -> Recipe:
    values = _with_settings(values, settings)
    if "code" in values:
        raise OptionError("'code' is named on the command line only", where=where, fix="use --model, --own-data")
    if code is not None:
        own: dict[str, Any] = {"net": OWN} if code.net is not None else {}
        own |= {"data": {"name": OWN}} if code.data is not None else {}
        values = merge(values, {**own, "code": code.model_dump()})
    return check_recipe(_with_own_methods(values), where=where)


def _with_own_methods(values: dict[str, Any]) -> dict[str, Any]:
    """Adds a digest of each user-defined method that the recipe names."""
    prune = values.get("prune")
    given = prune.get("methods") if isinstance(prune, dict) else None
    named = given if isinstance(given, list) else []
    own = {row.name: score_digest(row) for row in sipp.methods().values() if row.is_own and row.name in named}
    code = {**Code().model_dump(), **(values.get("code") or {}), "methods": own}
    return {**values, "code": code} if own else values


def _built_in(name: str) -> dict[str, Any]:
    if name not in RECIPES:
        hint = check.nearest(name, recipe_names())
        raise OptionError(f"unknown recipe {name!r:.80}{hint}", fix=f"`sipp run` lists all; or give a {SUFFIX} file")
    return values_of(name)


def _with_settings(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Applies all settings `a.b=value` at once, so that their order does not matter; validated later."""
    above: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise OptionError("write key=value, such as train.epochs=10", where=f"--set {setting!r}")
        if parts in (["name"], ["base"]):
            raise OptionError(
                f"{parts[0]!r} cannot be set", where=f"--set {setting!r}", fix="write a recipe file for that"
            )
        value: Any = read_yaml(text, where=f"--set {key}")
        for part in reversed(parts):
            value = {part: value}
        above = merge(above, value)
    return merge(values, above)


def read_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML document."""
    with needed_for("reading a recipe"):
        import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            twice = [key for key, _ in node.value if keys.count(key.value) > 1]
            if twice:
                at = f"{where}, line {twice[-1].start_mark.line + 1}"
                raise OptionError(f"the key {twice[-1].value!r} is given twice", where=at)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except OptionError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionError(f"not valid YAML: {' '.join(str(error).split())}", where=where) from error
