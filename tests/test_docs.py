"""Every block of README and docs runs, every docstring example is true, every public name and option is documented.

Marks in the pages: a block that begins with `# needs: PACKAGE, ...` runs where the packages are; one that begins with
`# continued` goes on where the block above it ended; one that begins with `# file: NAME` is also written to that file.
A `text` block is what an example prints (see `test_examples.py`). In a `sh` block, `# exit N` is the status a command
must have, and a command with `# not run: REASON` is only parsed. In place of a reader's own files (my.py, my.pt,
points.npz, new.npz) commands find those of `examples/paths/stand_ins.py`.
"""

import builtins
import doctest
import glob
import importlib
import importlib.util
import inspect
import io
import pkgutil
import re
import runpy
import shlex
import sys
import textwrap
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from shorter import narrow, shorten

import sipp
from sipp.cli.errors import run_and_report
from sipp.cli.main import app
from sipp.scoring.methods import METHODS, NAMES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOR_READERS = [ROOT / "README.md", *(page for page in PAGES if page.parent.name in ("tutorials", "how-to"))]
API = [ROOT / "docs" / "api.md", *sorted((ROOT / "docs" / "api").glob("*.md"))]
REFERENCE = "\n".join(page.read_text() for page in API)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


@dataclass(frozen=True)
class Block:
    page: str
    index: int
    kind: str
    text: str

    def mark(self, word: str) -> str | None:
        """What the first line says after this word."""
        found = re.match(rf"# {word}: (.+)", self.text)
        return found.group(1) if found else None

    @property
    def label(self) -> str:
        return f"{self.page}-{self.index}"


def blocks_of(page: str, text: str) -> list[Block]:
    return [Block(page, i, kind, body) for i, (kind, body) in enumerate(FENCE.findall(text))]


def sessions_of(blocks: list[Block]) -> list[list[Block]]:
    """The blocks that are run together, one session each: a block, and those that go on from it."""
    found: list[list[Block]] = []
    for block in blocks:
        if block.kind == "python" and block.mark("file") is None:
            if block.text.startswith("# continued\n"):
                found[-1].append(block)
            else:
                found.append([block])
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(str(page.relative_to(ROOT)), page.read_text())]
SESSIONS = sessions_of(BLOCKS)
# the GPU kernels need Triton to be imported, callbacks the library they are for
NOT_HERE = ("gpu", "integrations.lightning", "integrations.hugging_face")
MODULES = [m.name for m in pkgutil.walk_packages(sipp.__path__, "sipp.") if not any(x in m.name for x in NOT_HERE)]


def execute(*session: Block) -> None:
    """Runs blocks one after another, as a script of their own."""
    space: dict[str, object] = {"__name__": "__main__"}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in session:
            builtins.exec(compile(block.text, f"{block.page} block {block.index}", "exec"), space)


@pytest.mark.parametrize("session", SESSIONS, ids=[session[0].label for session in SESSIONS])
def test_code_blocks_run(session: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    needs = [name for block in session for name in (block.mark("needs") or "").split(", ") if name]
    if missing := [name for name in needs if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    execute(*session)


# --- commands -------------------------------------------------------------------------------------------------------


def check_command(line: str) -> None:
    """Runs (or, where it says so, parses) one line and compares its exit status with the one it announces."""
    command, _, remark = line.partition("  # ")
    words = shlex.split(command)
    words = words[words.index("sipp") + 1 :]  # behind `accelerate launch ... -m`
    if remark.startswith("not run: "):
        app.commands[words[0]].make_context(words[0], words[1:])
        return
    words = [found for word in words for found in (sorted(glob.glob(word)) or [word])]
    wanted = int(remark.removeprefix("exit ")) if remark.startswith("exit ") else 0
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), pytest.MonkeyPatch.context() as patch:
        shorten(words[0], patch)
        status = run_and_report(app, words)
    assert status == wanted, f"{line}\n{out.getvalue()}"


@pytest.fixture(scope="module")
def yours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with my.py, my.pt, points.npz and new.npz, which the pages say are the reader's."""
    folder = tmp_path_factory.mktemp("yours")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.manual_seed(0)
        runpy.run_path(str(ROOT / "examples/paths/stand_ins.py"))["a_trained_network"]()
    return folder


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.kind == "sh"}))
def test_commands_run_in_order(page: str, yours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in yours.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my", raising=False)
    narrow(monkeypatch)
    for block in (block for block in BLOCKS if block.page == page):
        if (name := block.mark("file")) is not None:
            (tmp_path / name).write_text(block.text)
            execute(block)
        elif block.kind == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                check_command(line)


def test_the_first_page_runs_twice_in_one_folder(yours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python block and its shell block write beside each other, and may be run again."""
    for path in yours.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my", raising=False)
    blocks = [block for block in BLOCKS if block.page == "README.md" and block.kind in ("python", "sh")]
    assert [block.kind for block in blocks] == ["python", "sh"]
    for block in (*blocks, *blocks):
        if block.kind == "python":
            execute(block)
        else:
            for line in block.text.splitlines():
                check_command(line)


def test_no_block_is_left_out() -> None:
    """Blocks are python, sh, what an example prints, or plain for drawings, `make` and installing; some of each."""
    assert {block.kind for block in BLOCKS} == {"python", "sh", "text", ""}
    assert all(block.text.startswith("$ python examples/") for block in BLOCKS if block.kind == "text")
    assert all(not re.search(r"^(import|sipp) ", block.text, re.M) for block in BLOCKS if block.kind == "")
    assert sum(block.page == "README.md" and block.kind == "python" for block in BLOCKS) >= 1


@pytest.mark.parametrize("page", FOR_READERS, ids=lambda page: page.name)
def test_pages_for_readers_are_short_and_plain(page: Path) -> None:
    """At most about three screens, without the numbers of statements: those belong to docs/theory.md."""
    text = page.read_text()
    assert len(text.splitlines()) <= 150
    assert not re.findall(r"\bT\d+\b", text)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#][^)]*)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    if ">>> " not in Path(str(module.__file__)).read_text():  # doctest would look through every name for nothing
        assert name not in {getattr(sipp, public).__module__ for public in sipp.__all__}
        return
    own = {key: inspect.unwrap(value) for key, value in vars(module).items() if inspect.isfunction(value)}
    decorated = {key: value for key, value in own.items() if value is not vars(module)[key]}  # doctest leaves these out
    monkeypatch.setattr(module, "__test__", {k: v for k, v in decorated.items() if v.__module__ == name}, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = doctest.testmod(module, verbose=False)
    assert result.failed == 0
    assert result.attempted


def sections_of(page: str) -> dict[str, str]:
    """The text below each heading of the second level, up to the next heading of the first two."""
    return dict(re.findall(r"^## (.*?)\n(.*?)(?=^##? |\Z)", page, re.S | re.M))


def gaps(name: str, page: str) -> list[str]:
    """What the documentation of a public name lacks: an example that runs, its section, its options."""
    thing = getattr(sipp, name)
    found = [] if ">>> " in (inspect.getdoc(thing) or "") else ["no example in the docstring"]
    sections = sections_of(page)
    if f"sipp.{name}" not in sections:
        return [*found, "no section in docs/api"]
    text = sections[f"sipp.{name}"] + sections["Shared options"]
    if inspect.isclass(thing):
        options = [*thing.__dataclass_fields__]
    else:
        options = [*inspect.signature(thing).parameters]
    return found + [f"{one} is not described" for one in options if not re.search(rf"`[^`\n]*\b{one}\b[^`\n]*`", text)]


def signature_of(name: str) -> str:
    """How a public function is called, as its section shows it: names and defaults; types are in the docstring."""
    found = inspect.signature(getattr(sipp, name))
    plain = found.replace(
        parameters=[one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    text = f"{name}{plain}"
    return "\n".join(textwrap.wrap(text, 110, subsequent_indent=" " * (len(name) + 1), break_on_hyphens=False))


@pytest.mark.parametrize("name", [name for name in sipp.__all__ if name != "Pruned"])
def test_signatures_are_those_of_the_code(name: str) -> None:
    assert f"## sipp.{name}\n\n```\n{signature_of(name)}\n```\n" in REFERENCE


@pytest.mark.parametrize("name", sipp.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert gaps(name, REFERENCE) == []
    assert len(sipp.__all__) <= 31


def test_the_index_links_to_every_section() -> None:
    for page in API[1:]:
        for name in re.findall(r"^## sipp\.(\w+)$", page.read_text(), re.M):
            link = f"[{name}](api/{page.name}#sipp{name.lower()})"
            assert link in API[0].read_text(), link


def test_documented_fields_of_a_pruned_network_exist() -> None:
    section = sections_of(REFERENCE)["sipp.Pruned"]
    names = [name for cell in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) > 15
    known = {*sipp.Pruned.__dataclass_fields__, *dir(sipp.Pruned)}
    assert [name for name in names if name not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_in_the_docs_exist(page: Path) -> None:
    for dotted in re.findall(r"`sipp((?:\.\w+)+)", page.read_text()):
        if not any(name in dotted for name in NOT_HERE):
            pkgutil.resolve_name(f"sipp{dotted}")


def test_the_package_is_typed() -> None:
    assert (Path(sipp.__file__).parent / "py.typed").is_file()


def test_the_table_of_methods_is_the_list_of_methods() -> None:
    rows = re.findall(r"^\| `([a-z0-9._-]+)`(?: \(default\))? \| ([^|]*) \| ([^|]*) \|", REFERENCE, re.M)
    known = [row for row in rows if row[0] in NAMES]
    expected = [(row.name, row.about, ", ".join(sorted(row.needs)) or "nothing") for row in METHODS]
    assert known == expected
