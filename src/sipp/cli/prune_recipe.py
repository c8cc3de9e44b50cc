"""Reads the file of `sipp prune --recipe`: shared options, overridden by typed ones."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from sipp.cli.commands.prune_command import PruneRequest
from sipp.cli.errors import CommandError, naming_option
from sipp.errors import OptionError
from sipp.records.checking import nearest
from sipp.records.options import CliOption, PruneOptions

GOALS = ("keep", "budget", "pattern", "epsilon", "max_accuracy_drop")  # exactly one is given
TOLERANCES = ("epsilon", "max_accuracy_drop")
SUFFIXES = (".yaml", ".yml", ".json")
MAX_BYTES = 1 << 16


def known_keys() -> list[str]:
    """The keys of a recipe: the options of `sipp.prune`, and the two tolerances."""
    hints = get_type_hints(PruneOptions, include_extras=True)
    shown = [
        field.name
        for field in fields(PruneOptions)
        if any(isinstance(a, CliOption) for a in get_args(hints[field.name]))
    ]
    return [*shown, *TOLERANCES]


def with_recipe(request: PruneRequest, path: Path, typed: set[str]) -> PruneRequest:
    """Applies the recipe to the request, except for options that were typed."""
    with naming_option(f"--recipe {path}", "see sipp prune --help"):
        values = _read(path)
        for key in values:
            if key not in known_keys():
                hint = nearest(key, known_keys())
                raise OptionError(f"unknown key {key!r:.60}{hint}", fix=f"known: {', '.join(known_keys())}")
        if typed.intersection(GOALS):  # overrides the recipe's goal
            values = {key: value for key, value in values.items() if key not in GOALS}
        left = {key: value for key, value in values.items() if key not in typed and f"no_{key}" not in typed}
        tolerances = {key: _number(key, left.pop(key)) for key in TOLERANCES if key in left}
        if "refit" in typed:
            left.pop("repair", None)
        try:
            options: PruneOptions = replace(request.options, **left)
            epsilon, drop = (tolerances.get(key, getattr(request, key)) for key in TOLERANCES)
            return replace(request, options=options, epsilon=epsilon, max_accuracy_drop=drop)
        except OptionError as error:
            quoted = "; in YAML write it in quotes: '2:4'" if error.option == "pattern" or "pattern" in left else ""
            raise OptionError(f"{error.fault}{quoted}", fix=error.fix) from error


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(f"{key}: {value!r:.60} is not a number")
    return float(value)


def _read(path: Path) -> dict[str, Any]:
    """Reads a mapping from YAML, or from JSON, which needs no extra package."""
    if path.suffix not in SUFFIXES:
        raise CommandError("a recipe ends in .yaml or .json", where=f"--recipe {path}", fix="give such a file")
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise OSError(f"it is not a plain file of at most {MAX_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text)
        else:
            from sipp.experiments.recipes.yamlfile import read_yaml

            values = read_yaml(text, where=str(path))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise OptionError(f"cannot be read as a recipe: {error}", fix="give a whole .yaml or .json file") from error
    if not isinstance(values, dict):
        raise OptionError("a recipe is a mapping, such as 'keep: 0.2'", fix="write one option per line")
    return values
