"""Writes `docs/command-line-reference.md` from the commands themselves: `python docs/write_command_reference.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from sipp.cli.main import app

PAGE = Path(__file__).parent / "command-line-reference.md"
HEAD = """# Command-line reference

Every command with its options, as `sipp COMMAND --help` shows them.
[Scripts and CI](how-to/command-line.md) shows how they work together.
"""


def reference() -> str:
    """The page."""
    return "\n".join([HEAD, *(_section(name) for name in app.commands)])


def _section(name: str) -> str:
    command = app.commands[name]
    parameters = [one for one in command.params if one.name != "help"]
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option" and not one.hidden]
    usage = " ".join([f"sipp {name}", *(_argument(one) for one in arguments), *(["[OPTIONS]"] if options else [])])
    first = command.help.partition("\n\n")[0]
    lines = [f"## sipp {name}\n", f"{_flat(first)}\n", f"`{usage}`\n"]
    rows = [(f"`{_argument(one)}`", "", _flat(one.help or "")) for one in arguments]
    rows += [(_names(one), _default(one), _flat(one.help or "")) for one in options]
    if rows:
        lines += ["| option | default | meaning |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines)


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name).upper().strip("[]")
    name = f"{name}..." if parameter.nargs == -1 else name
    return name if parameter.required else f"[{name}]"


def _names(option: Any) -> str:
    takes = "" if option.is_flag else f" {_value(option)}"
    first, *others = [*sorted(option.opts, key=len, reverse=True), *option.secondary_opts]
    return ", ".join([f"`{first}{takes}`", *(f"`{name}`" for name in others)])


def _value(option: Any) -> str:
    """What an option takes: its choices, or its type."""
    if option.metavar:
        return str(option.metavar)
    annotation = option.type_descriptor.annotation
    return "\\|".join(_word(one) for one in get_args(annotation) or (annotation,))


def _word(kind: Any) -> str:
    return kind.__name__.upper() if isinstance(kind, type) else str(kind)


def _default(option: Any) -> str:
    value = option.default
    is_none = callable(value) or value is None or isinstance(value, bool) or value in ((), [])
    return "" if is_none else f"`{value}`"


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
