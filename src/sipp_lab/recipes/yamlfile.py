"""Reads a plain subset of YAML: dictionaries, lists, numbers and text.

Tags (which construct objects), anchors and aliases (which can expand exponentially), merge keys and repeated keys are
refused: a recipe needs none of them.
"""

from __future__ import annotations

from typing import Any

from sipp.errors import OptionError
from sipp.extras import needed_for

with needed_for("reading a recipe"):
    import yaml  # type: ignore[import-untyped]

MAX_CHARACTERS = 65_536
TEXT = "tag:yaml.org,2002:str"


def read_yaml(text: str, *, where: str) -> Any:
    """The value of one YAML document; `where` names it in errors."""
    if len(text) > MAX_CHARACTERS:
        raise OptionError(f"{len(text)} characters are too many for a recipe (at most {MAX_CHARACTERS})", where=where)
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):  # before anything is constructed
            at = f"{where}, line {token.start_mark.line + 1}"
            if isinstance(token, yaml.AnchorToken | yaml.AliasToken):
                raise OptionError("anchors and aliases are not allowed", where=at, fix="derive recipes with 'base:'")
            if isinstance(token, yaml.TagToken):
                raise OptionError(f"the tag {token.value[1]!r} is not allowed", where=at, fix="give plain values")
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionError(f"not valid YAML: {' '.join(str(error).split())}", where=where) from error
    except RecursionError as error:
        raise OptionError("nested too deeply for a recipe", where=where) from error
    except (ValueError, OverflowError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"a value cannot be read: {error}", where=where) from error


def _check_keys(node: Any, where: str) -> None:
    """Raises if a key is given twice, or is not plain text."""
    children, seen = node.value if isinstance(node, yaml.CollectionNode) else [], set[str]()
    if isinstance(node, yaml.MappingNode):
        for key, _ in children:
            at = f"{where}, line {key.start_mark.line + 1}"
            if key.tag != TEXT:
                raise OptionError(f"the key {key.value!r:.60} is not plain text", where=at)
            if key.value in seen:
                raise OptionError(f"the key {key.value!r} is given twice", where=at)
            seen.add(key.value)
        children = [value for _, value in children]
    for child in children:
        _check_keys(child, where)
