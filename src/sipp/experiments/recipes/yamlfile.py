"""Reads a plain subset of YAML: dictionaries, lists, numbers and text.

Tags (which construct objects), anchors and aliases (which can expand exponentially), merge keys, repeated keys and
dates are refused: a recipe needs none of them.
"""

from __future__ import annotations

from typing import Any

from sipp.errors import OptionError
from sipp.extras import needed_for

with needed_for("reading a recipe"):
    import yaml  # type: ignore[import-untyped]

MAX_CHARACTERS = 65_536
_PREFIX = "tag:yaml.org,2002:"
_PLAIN = {_PREFIX + kind for kind in ("str", "int", "float", "bool", "null")}


def read_yaml(text: str, *, where: str) -> Any:
    """The value of one YAML document; `where` names it in errors."""
    if len(text) > MAX_CHARACTERS:
        raise OptionError(f"{len(text)} characters are too many for a recipe (at most {MAX_CHARACTERS})", where=where)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):  # before anything is constructed
            at = f"{where}, line {event.start_mark.line + 1}"
            if getattr(event, "anchor", None) is not None:  # aliases have one too
                raise OptionError("anchors and aliases are not allowed", where=at, fix="derive recipes with 'base:'")
            if getattr(event, "tag", None) is not None:
                raise OptionError(f"the tag {event.tag!r} is not allowed", where=at, fix="give plain values")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return None if node is None else _construct(loader, node, where)
    except yaml.YAMLError as error:
        raise OptionError(f"not valid YAML: {' '.join(str(error).split())}", where=where) from error
    except RecursionError as error:
        raise OptionError("nested too deeply for a recipe", where=where) from error
    except (ValueError, OverflowError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"a value cannot be read: {error}", where=where) from error


def _construct(loader: Any, node: Any, where: str) -> Any:
    at = f"{where}, line {node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, where) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if key_node.tag != _PREFIX + "str":
                raise OptionError(f"the key {key!r} is not plain text", where=at)
            if key in mapping:
                line = key_node.start_mark.line + 1
                raise OptionError(f"the key {key!r} is given twice", where=f"{where}, line {line}")
            mapping[key] = _construct(loader, value_node, where)
        return mapping
    if node.tag not in _PLAIN:
        raise OptionError(f"{node.value!r} is not a number, text, true, false or null", where=at)
    return loader.construct_object(node)
