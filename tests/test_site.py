"""The site of `make docs` is built without a warning, fetches nothing, and every link in it leads somewhere."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).parent.parent
STUDY = "results/iterative-13-epochs"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")


class Reader(HTMLParser):
    """The places that links lead to, what the page loads, and the names of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given or (tag == "link" and "href" in given):
            self.loads.append(given.get("src", given.get("href", "")))


@functools.cache
def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def pages(site: Path) -> Iterator[Path]:
    yield from sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def lost(site: Path, page: Path) -> list[str]:
    """What the page links to or loads that is not in the site, and what it would load from elsewhere."""
    found, wrong = read(page), []
    for target in found.links + found.loads:
        if re.match(r"(https?:)?//", target):
            wrong += [target] if target in found.loads else []
        elif not target.startswith(("data:", "javascript:", "mailto:", "blob:")):
            address, place = urldefrag(target)
            path = (page.parent / unquote(address)).resolve() if address else page
            path = path / "index.html" if path.is_dir() else path
            is_there = path.is_file() and path.is_relative_to(site.resolve())
            if not is_there or (place and path.suffix == ".html" and unquote(place) not in read(path).names):
                wrong.append(target)
    return wrong


def test_every_link_leads_somewhere_and_nothing_is_fetched(site: Path) -> None:
    found = {str(page.relative_to(site)): lost(site, page) for page in pages(site)}
    assert {page: targets for page, targets in found.items() if targets} == {}
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", styles)


def test_all_pages_of_the_repository_are_there(site: Path) -> None:
    names = {str(page.relative_to(site)) for page in pages(site)}
    texts = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "results").rglob("*.md"),
    ]
    for path in texts:
        name = path.relative_to(ROOT).with_suffix(".html")
        assert str(name.with_name("index.html") if path.name == "README.md" else name) in names


def test_the_page_of_a_real_study_is_embedded(site: Path) -> None:
    assert "page.html" in read(site / STUDY / "index.html").loads
    page = (site / STUDY / "page.html").read_text(encoding="utf-8")
    assert "<h1" in page and "sipp-blend" in page and "resnet20 on cifar10" in page
