"""Keeps the numbers of README and docs equal to what the benchmarks wrote.

    python benchmarks/quotes.py            # names every number that differs from its file
    python benchmarks/quotes.py --fill     # writes the numbers of the files into the pages

A page quotes a figure by a comment right behind the number, which readers do not see:

    sipp keeps **90.0 %**<!-- repair-cpu: resnet20.0.2.accuracy --> of them

That is the value at this place of `benchmarks/figures/repair-cpu.json`, rounded as the page rounds it. Such a file has
the keys `command`, `commit`, `machine`, `work` (its shape, in words) and `values`; `write_figures` in `common.py`
writes it. A place names keys one after the other, with dots between them; keys may hold dots themselves.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "figures"
KEYS = ("command", "commit", "machine", "work", "values")
# a number, its unit and the end of what is bold, then the comment
QUOTE = re.compile(
    r"(?P<number>\d[\d,]*(?:\.\d+)?)(?P<unit>[^\d\n|<]{0,24})"
    r"<!-- (?P<file>[\w-]+): (?P<place>[^>]+) -->"
)


@dataclass(frozen=True)
class Quote:
    """One number of a page that a file must hold."""

    page: str
    line: int
    number: str
    file: str
    place: str

    @property
    def right(self) -> str:
        """The number as the file has it, with the decimals and the separators of the page."""
        places = len(self.number.partition(".")[2])
        value = value_at(figures(self.file)["values"], self.place)
        rounded = Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-places), ROUND_HALF_EVEN)
        return f"{rounded:,}" if "," in self.number or abs(rounded) >= 10_000 else str(rounded)


def pages() -> list[Path]:
    """README and all of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def quotes_in(text: str, page: str) -> Iterator[Quote]:
    """The quoted numbers of a page."""
    for line, words in enumerate(text.split("\n"), 1):
        for match in QUOTE.finditer(words):
            yield Quote(page, line, match["number"], match["file"], match["place"].strip())


def figures(name: str) -> Mapping[str, Any]:
    """A file of figures; ValueError if it is not whole."""
    path = FIGURES / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"benchmarks/figures has no {name}.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in KEYS if not found.get(key)]
    if missing:
        raise ValueError(f"{name}.json does not say its {', '.join(missing)}")
    return found


def value_at(values: Any, place: str) -> float:
    """The number at a place such as `resnet20.0.2.accuracy`; ValueError if there is none."""
    if isinstance(values, Mapping) and place:
        for key, inner in values.items():
            if place == key or place.startswith(f"{key}."):
                return value_at(inner, place[len(key) + 1 :])
        raise ValueError(f"no {place!r} among {', '.join(values)}")
    if place or isinstance(values, bool) or not isinstance(values, int | float):
        raise ValueError(f"{values!r} is not a number at this place")
    return float(values)


def problems_in(text: str, page: str) -> list[str]:
    """What is wrong with the quotes of a page, a line each."""
    found = []
    for quote in quotes_in(text, page):
        where = f"{quote.page}:{quote.line}: {quote.number} ({quote.file}: {quote.place})"
        try:
            if quote.right != quote.number:
                found.append(f"{where}: the file has {quote.right}")
        except ValueError as error:
            found.append(f"{where}: {error}")
    n_marks = text.count("<!-- ") and len(re.findall(r"<!-- [\w-]+: [\w.]", text))
    if n_marks != len(list(quotes_in(text, page))):
        found.append(f"{page}: a comment quotes a figure, but no number stands before it")
    return found


def filled(text: str, page: str) -> str:
    """The page with the numbers of the files."""
    right = iter([quote.right for quote in quotes_in(text, page)])
    return QUOTE.sub(lambda match: next(right) + match[0][len(match["number"]) :], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fill", action="store_true", help="write the right numbers into the pages")
    fills = parser.parse_args().fill
    problems = []
    for path in pages():
        text, page = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        if fills:
            text = filled(text, page)
            path.write_text(text, encoding="utf-8")
        problems += problems_in(text, page)
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
