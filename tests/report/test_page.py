"""The page as text: whole, harmless, small, and asking for nothing from outside."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.synthetic import big_run, certificate, config, dense, facts, layer, write_run
from report.test_result_folders import pruned_folder

from sipp.report import plots
from sipp.results import Coverage, Guarantee, NetworkBound, to_json
from sipp_lab.page import read_results, render
from sipp_lab.runs.folder import read_run

VOID = {"meta", "link", "br", "img", "input", "hr"}
MAX_BYTES = 3_000_000


class Checker(HTMLParser):
    """Tags that are not closed in order, and addresses that lead outside."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.outside: list[str] = []
        self.idents: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data") and not re.match(r"#|data:,$", value or ""):
                self.outside.append(f"{tag} {name}={value}")
            if name == "id":
                self.idents.append(value or "")
            if name.startswith("on"):
                self.faults.append(f"handler {name}")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.outside += re.findall(r"url\([^)]*\)|@import[^;]*|fetch\(|XMLHttpRequest|sendBeacon|WebSocket", data)


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    return checker


def faults(page: str) -> list[str]:
    found = check(page)
    twice = [ident for ident in found.idents if found.idents.count(ident) > 1]
    return [*found.faults, *found.open, *found.outside, *twice]


def data_of(page: str) -> dict[str, dict[str, object]]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert match is not None
    return json.loads(match[1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """5 methods x 20 levels x 3 seeds of a network with 56 layers."""
    return render(*read_results([big_run(tmp_path_factory.mktemp("big") / "run")]))


def test_the_page_is_valid_and_self_contained(page: str) -> None:
    assert faults(page) == []


@pytest.mark.parametrize(
    "broken",
    [
        "<section>",
        '<img src="https://example.org/x.png">',
        "<style>p{background:url(https://example.org/x.png)}</style>",
        '<p onclick="x()"></p>',
        '<p id="main"></p>',
    ],
)
def test_the_check_finds_what_is_broken(page: str, broken: str) -> None:
    assert faults(page.replace("</main>", broken + "</main>")) != []


def test_the_page_is_small(page: str) -> None:
    assert len(page.encode()) < MAX_BYTES
    plots = data_of(page)["plots"]
    assert {key.removeprefix("part0-") for key in plots} == {"accuracy", "certified", "layers"}


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028'\""


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    settings = config(name=HOSTILE, pipeline=HOSTILE, methods=(HOSTILE,), n_levels=1, n_seeds=1)
    settings["net"] = settings["data"]["name"] = settings["train"]["x" + HOSTILE] = HOSTILE
    known = facts([layer(HOSTILE, 2, 1, eps=1.0, dead=0)], method=HOSTILE, epsilon=1.0)
    record = {**dense(0), "method": HOSTILE, "level": 1, "pruned": to_json(known), "why_no_certificate": HOSTILE}
    run = write_run(tmp_path / "run", settings, [dense(0), record])
    pruned_folder(tmp_path / "net", method=HOSTILE, rest={"extra": HOSTILE})
    made = render(*read_results([run, tmp_path / "net"]))
    assert faults(made) == []
    assert made.count("<script") == 2 and "<img" not in made
    assert HOSTILE in json.dumps(data_of(made), ensure_ascii=False).replace('\\"', '"')


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    folder = big_run(tmp_path / "run", methods=("sipp-det", "magnitude"), n_levels=2, n_seeds=2, n_layers=2)
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    for n_done in (0, 1, 4, 7):
        (folder / "records.jsonl").write_text("".join(lines[:n_done]))
        made = render(*read_results([folder]))
        assert faults(made) == []
        assert f"run is not finished: {n_done} of 10 networks" in made
    (folder / "records.jsonl").write_text("".join(lines))
    assert "run is not finished" not in render([read_run(folder)])


def test_the_page_keeps_its_caveats(page: str) -> None:
    assert "before retraining" in page and "best of several does not" in page


def test_a_pruned_model(tmp_path: Path) -> None:
    folder = pruned_folder(tmp_path / "net", certificate=certificate(0.2501), model="my:net", rest={"asked": {}})
    made = render(*read_results([folder]))
    assert faults(made) == []
    assert "the output stays within 25.1 % of the original (95 % confidence)" in made  # rounded up
    assert (
        "21.3 % of the weights" in made
        and "pruned model, sipp-hybrid" in made
        and "What to do next" in made
        and f"sipp bench {folder} --model my:net" in made
    )
    assert "2 rows in 1 layer lost all weights" in made
    assert "0.weight keeps" not in made and "1.weight keeps the smallest share" in made
    refused = pruned_folder(tmp_path / "no", certificate=certificate(float("inf"), verdict="not certified"))
    assert "Certificate: not certified" in render(*read_results([refused]))


def test_a_contradicted_bound_is_called_so() -> None:
    of_layers = Coverage(0.1, 0.95, 30, 1)
    for n_never_above, word in ((50, "Contradicted by the data: zeros"), (0, "Not met: zeros")):
        guarantee = Guarantee(1e-16, 300, 400, "inputs", 3.0, 3.0, "zeros", 60, n_never_above, of_layers)
        bound = NetworkBound("paper", 2.0, 1e-16, guarantee, "zeros")
        known = facts([layer("a", 2, 1, eps=1.0, dead=0)], method="sipp-det", epsilon=2.0)
        card = plots.statement_cards(replace(known, bound=bound, guarantee=guarantee), None)[-1]
        assert card["text"].startswith(word)
