"""A recipe by name, or from a YAML file that changes one (`base:`), with the settings of the command line over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sipp.errors import OptionError
from sipp.extras import needed_for
from sipp.results import check
from sipp_lab.recipes.schema import Recipe, check_recipe, is_own
from sipp_lab.recipes.table import RECIPES

SUFFIX = ".yaml"

# Keys that exclude each other: one in a recipe removes those from its base. These names are unique among all sections.
ALTERNATIVES = {
    "keeps": ("alpha", "levels"),
    "alpha": ("keeps",),
    "levels": ("keeps",),
    "milestones": ("every",),
    "every": ("milestones",),
}

Values = dict[str, Any]


def load_recipe(
    name_or_path: str, *, settings: Sequence[str] = (), net: str | None = None, data: str | None = None
) -> Recipe:
    """Loads a recipe by name or from a .yaml file, and applies `key=value` settings (dotted keys, YAML values).

    `net` and `data` name the caller's own (package.module:callable), which replace the recipe's.
    """
    own: Values = {"net": net} if net is not None else {}
    own |= {"data": {"name": data}} if data is not None else {}
    if not name_or_path.endswith(SUFFIX):
        return recipe_of({"base": name_or_path}, where=f"recipe {name_or_path!r}", settings=settings, own=own)
    path = Path(name_or_path)
    try:
        values = read_yaml(path.read_text(encoding="utf-8"), where=name_or_path)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot be read as a recipe: {error}", where=path) from error
    if not isinstance(values, dict):
        raise OptionError(f"a recipe is a mapping of keys to values, not a {type(values).__name__}", where=path)
    values = {"name": path.name.removesuffix(SUFFIX), **values}
    return recipe_of(values, where=name_or_path, settings=settings, own=own)


def recipe_of(
    values: Mapping[str, Any], *, where: str, settings: Sequence[str] = (), own: Mapping[str, Any] = {}
) -> Recipe:
    """The recipe with these values over those of the built-in recipe that is its `base`, if it names one."""
    all_values = {key: value for key, value in values.items() if key != "base"}
    if "base" in values:
        all_values = merge({"name": values["base"], **_built_in(values["base"])}, all_values)
    all_values = merge(all_values, _of_settings(settings))
    data = all_values.get("data")
    names = (all_values.get("net"), data.get("name") if isinstance(data, dict) else None)
    if any(isinstance(name, str) and is_own(name) for name in names):
        raise OptionError("your own code is named on the command line only", where=where, fix="use --model, --own-data")
    all_values = merge(all_values, dict(own))
    train, again = all_values.get("train"), all_values.get("retrain")
    if isinstance(train, dict) and isinstance(again, dict):
        all_values["retrain"] = merge(train, again)
    return check_recipe(all_values, where=where)


def _built_in(name: Any) -> Values:
    if not isinstance(name, str) or name not in RECIPES:
        hint = check.nearest(name, RECIPES)
        raise OptionError(f"unknown recipe {name!r:.80}{hint}", fix=f"`sipp run` lists all; or give a {SUFFIX} file")
    return RECIPES[name]


def _of_settings(settings: Sequence[str]) -> Values:
    """The values of all settings `a.b=value`, merged before they are applied, so that their order does not matter."""
    above: Values = {}
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
    return above


def read_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML document."""
    with needed_for("reading a recipe"):
        import yaml  # type: ignore[import-untyped]
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise OptionError(f"not valid YAML: {' '.join(str(error).split())}", where=where) from error


# --- one recipe over another ------------------------------------------------------------------------------------------


def merge(below: Values, above: Values) -> Values:
    """Merges `above` into `below`, mapping by mapping; a key removes its `ALTERNATIVES`.

    If a section has other epochs and does not say when the rate decays, it decays at the same shares of them.
    """
    ended = {other for key in above for other in ALTERNATIVES.get(key, ())} - above.keys()
    values = {key: value for key, value in below.items() if key not in ended}
    for key, value in above.items():
        old = values.get(key)
        values[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    if "epochs" in above and "decay" not in above:
        _scale_schedule(values, below.get("epochs"), above["epochs"])
    return values


def _scale_schedule(section: Values, before: Any, now: Any) -> None:
    """Scales the decay of a section to another number of epochs, and shortens a warm-up beyond their end."""
    if not all(isinstance(n, int) and n > 0 for n in (before, now)):
        return  # the schema says what is wrong
    if (decay := section.get("decay")) and decay.get("milestones"):
        epochs = {round(epoch * now / before) for epoch in decay["milestones"]}
        section["decay"] = {**decay, "milestones": sorted(epoch for epoch in epochs if 0 < epoch < now)}
    elif decay and decay.get("every"):
        section["decay"] = {**decay, "every": max(1, round(decay["every"] * now / before))}
    if isinstance(section.get("warmup_epochs"), int | float):
        section["warmup_epochs"] = min(section["warmup_epochs"], float(now))
