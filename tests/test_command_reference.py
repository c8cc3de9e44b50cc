"""The page of all commands is the one that `docs/write_command_reference.py` writes."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_all_commands_is_current() -> None:
    made = runpy.run_path(str(DOCS / "write_command_reference.py"))
    page = (DOCS / "command-line-reference.md").read_text(encoding="utf-8")
    assert page == made["reference"](), "run python docs/write_command_reference.py"
