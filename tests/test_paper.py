"""docs/paper.md: every place in the code that it names is there, every command it gives is one, nothing is left out."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from sipp.cli.main import COMMANDS
from sipp_lab.recipes import load_recipe
from sipp_lab.studies import STUDIES

PAGE = (Path(__file__).parents[1] / "docs" / "paper.md").read_text()
CODE = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+):([A-Za-z_]+)`", PAGE)
LINES = re.findall(r"`sipp ([^`]+)`", PAGE)


@pytest.mark.parametrize(("module", "name"), CODE, ids=lambda word: word)
def test_code_that_the_paper_page_names_exists(module: str, name: str) -> None:
    assert hasattr(import_module(module if module.startswith("sipp_lab.") else f"sipp.{module}"), name)


def test_commands_on_the_paper_page_exist() -> None:
    assert len(CODE) > 20 and len(LINES) > 15
    for line in LINES:
        command, *words = shlex.split(line)
        assert command in COMMANDS
        if command == "study" and words[0] != "NAME":
            assert STUDIES[words[0]].recipes("full" if "--full" in words else "short")
        if command == "run":
            assert load_recipe(words[0]).name == words[0]


def test_the_paper_page_names_every_study() -> None:
    for name in STUDIES:
        assert f"`sipp study {name}`" in PAGE and f"`sipp study {name} --full`" in PAGE
    for what in ("Regularity assumption", "sign complexity", "OptAlloc", "Sparsify", "SiPPsimple", "ImageNet", "CNN5"):
        assert what in PAGE
