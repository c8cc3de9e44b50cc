"""Options that are fields of a record: each field once, typed and parsed as it says, refused at its own option."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

import pytest
from commandline import run, three_lines

from sipp.cli.commands.prune_command import PruneRequest
from sipp.cli.errors import CommandError
from sipp.cli.main import command_of
from sipp.cli.options import Part, as_command
from sipp.cli.output import Answer
from sipp.results.options import Option, PruneOptions

SHOWN = {
    name: next((one for one in get_args(hint)[1:] if isinstance(one, Option)), None)
    for name, hint in get_type_hints(PruneOptions, include_extras=True).items()
}


def asked(request: PruneRequest) -> Answer:
    raise RuntimeError(request)


def typed_out(typed: dict[str, Any]) -> dict[str, Any]:
    """These options, and all others as --help says."""
    parameters = as_command(asked).__signature__.parameters  # type: ignore[attr-defined]
    return {name: one.default for name, one in parameters.items()} | {"model": "net"} | typed


def given(**typed: Any) -> PruneRequest:
    """The record that a command gets for these options."""
    with pytest.raises(RuntimeError) as stop:
        as_command(asked)(**typed_out(typed))
    found: PruneRequest = stop.value.args[0]
    return found


def test_every_field_that_is_shown_is_an_option_with_its_default() -> None:
    by_name = {one.name: one for one in command_of("prune").params}
    for field in fields(PruneOptions):
        shown = SHOWN[field.name]
        typed = f"no_{field.name}" if field.default is True else field.name
        if shown is None or shown.group is None:
            assert typed not in by_name
            continue
        assert by_name[typed].rich_help_panel == shown.group
        assert by_name[typed].help.startswith(shown.words.split("{")[0])
    assert given().options == PruneOptions()


def test_what_is_typed_reaches_the_record() -> None:
    found = given(keep=0.2, floor=0.1, no_statements=True, repair=True, include=["conv*"], seed=3, out=None)
    expected = PruneOptions(keep=0.2, floor=0.1, statements=False, repair=True, include=["conv*"], seed=3)
    assert found.options == expected and found.model == "net"


@pytest.mark.parametrize(
    ("typed", "where"),
    [
        ({"confidence": 2.0}, "--confidence 2.0"),
        ({"floor": 1.5}, "--floor 1.5"),
        ({"keep": 0.0}, "--keep 0.0"),
    ],
)
def test_what_the_record_refuses_is_told_at_its_option(typed: dict[str, Any], where: str) -> None:
    with pytest.raises(CommandError) as refused:
        as_command(asked)(**typed_out(typed))
    assert refused.value.where == where and "=" not in refused.value.what.split(" is ")[0]
    assert ("below 1" in refused.value.what) == (where == "--floor 1.5")


@pytest.mark.parametrize("words", [["--floor", 0.1], ["--c-constant", 2], ["--no-statements"]])
def test_an_option_that_prune_to_would_ignore_is_refused(words: list[object]) -> None:
    done = run("prune", "--model", "digits-cnn", "--data", "digits", "--dry-run", "--epsilon", 0.1, *words)
    assert done.returncode == 2 and f"{words[0]} does nothing with --epsilon" in three_lines(done.stderr)[0]


def test_a_record_inside_a_record_and_the_order_of_groups() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Inner:
        late: Annotated[int, Option("b", "Machine")] = 2
        first: Annotated[int, Option("a", "Model and data")] = 1

    globals()["Inner"] = Inner

    @as_command
    def command(inner: Inner, word: Annotated[str, Option("c", "Output")] = "x") -> Answer:
        raise RuntimeError(inner, word)

    assert [*command.__signature__.parameters] == ["first", "word", "as_json", "late"]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError) as stop:
        command(first=5, late=6, word="y", as_json=False)
    assert stop.value.args == (Inner(first=5, late=6), "y")


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("logits", "logits"), ("-1", "-1"), (None, None)])
def test_the_output_to_compare_is_an_index_or_a_name(text: str | None, value: object) -> None:
    @as_command
    def command(part: Part = None) -> Answer:
        raise RuntimeError(part)

    assert given(part=text).part == value
    with pytest.raises(RuntimeError) as stop:  # of a command without a record
        command(part=text, as_json=False)
    assert stop.value.args == (value,)
