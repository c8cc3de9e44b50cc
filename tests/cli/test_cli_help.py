"""--help of every command: options in groups, the most used first, each with its meaning, at 80 and 120 columns."""

from __future__ import annotations

import itertools
import re
from typing import Any, get_args

import pytest
from commandline import run
from typer import rich_utils

from sipp.cli.main import COMMANDS, command_of
from sipp.results.options import Group

PANELS = list(get_args(Group))
FEW = 10  # options that need no groups
FIRST = ["model", "keep", "holdout", "repair", "out", "device"]  # of the groups of prune


def options_of(name: str) -> list[Any]:
    return [one for one in command_of(name).params if one.param_type_name == "option"]


def groups_of(name: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for one in options_of(name):
        found.setdefault(one.rich_help_panel, []).append(one)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_many_options_stand_in_groups_in_one_order(name: str) -> None:
    if len(options_of(name)) <= FEW:
        return
    groups = list(groups_of(name))
    assert set(groups) <= set(PANELS) and groups == sorted(groups, key=PANELS.index), groups
    # a group is not left and come back to: the order of --help is that of the arguments
    order = [one.rich_help_panel for one in options_of(name)]
    assert sum(a != b for a, b in itertools.pairwise(order)) == len(groups) - 1


def test_the_long_commands_have_groups_and_the_most_used_come_first() -> None:
    for name in ("prune", "compare", "certify", "run"):
        assert len(options_of(name)) > FEW and len(groups_of(name)) > 2
    assert [group[0].name for group in groups_of("prune").values()] == FIRST


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_keeps_its_meaning_and_nothing_is_cut(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", columns)
    text = run(name, "--help").stdout
    assert max(map(len, text.splitlines())) <= columns and "\N{HORIZONTAL ELLIPSIS}" not in text
    for one in options_of(name):
        assert re.search(rf"{one.opts[0]}\s", text), one.name
        # The help stands in a column of its own, on several lines: all of its words, in their order
        words, rest = one.help.split(), text[text.index(one.opts[0]) :]
        assert one.help.strip() and "\n" not in one.help
        assert re.search(r".*?".join(map(re.escape, words)), rest, flags=re.S), one.name
    titles = re.findall(r"^╭─ (.*?) ─", text, flags=re.M)
    assert titles == [title for title in ["Arguments", "Options", *PANELS] if title in titles]
    assert "--help" in text.split("─ Output ─")[1]  # not alone in a group before all others
