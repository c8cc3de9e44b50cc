"""What a reader sees, in a real browser: nothing is cut off, sections have one heading, what says nothing is marked.

`AXE_CORE` may name the file axe.min.js (`npm pack axe-core`): then the pages are checked for accessibility too.
"""

import html
import json
import os
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from report.browser import CHROMIUM, Visit, visit
from report.synthetic import big_run, certificate, evaluation
from report.test_result_folders import pruned_folder

from sipp.results import FittedLayer, OutputChange, Repair
from sipp_lab.page import read_results, render

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")

CSS = resources.files("sipp.report").joinpath("assets", "page.css").read_text()
SURVEY = (Path(__file__).parent / "survey.js").read_text()
NAMES = (Path(__file__).parent / "names.js").read_text()
WIDTHS = (390, 800, 1440)
ONE_SCREEN = 844  # pixels high, of a phone that is 390 wide
N_LAYERS = 9
METHODS = (
    "sipp-blend",
    "sipp-hybrid",
    "sipp-det mean",
    "sipp-det max",
    "sipp-rand",
    "magnitude",
    "snip",
    "lamp",
    "random",
)
AXE = Path(os.environ.get("AXE_CORE") or "axe.min.js")
RUN_AXE = """
document.querySelectorAll("details").forEach((one) => { one.open = true; });
const found = await axe.run(document);
const grave = found.violations.filter((one) => ["serious", "critical"].includes(one.impact));
return grave.map((one) => one.id + " " + one.nodes[0].html);
"""


def repaired(after: float) -> Repair:
    layers = (
        FittedLayer("0.weight", "searched", 4, ridge=1e-3, error_before=0.5, error_after=after),
        FittedLayer("1.weight", "unfitted", 4, left_alone="its input is not seen"),
    )
    counts = {"n_fit": 90, "n_validation": 10, "n_test": 10}
    errors = {"output_before": 0.8, "output_after": after, "output_validation": after}
    return Repair(layers, **counts, **errors, polish=None, undone="")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of a run, of four networks pruned from one, and of one network that was repaired."""
    base = tmp_path_factory.mktemp("look")
    run = big_run(base / "run", methods=METHODS, n_levels=4, n_seeds=2, n_layers=N_LAYERS)
    nets = base / "nets"
    for index, (arm, kept, epsilon) in enumerate(
        [
            ("magnitude", (9, 20), 1.25),
            ("magnitude", (12, 40), 0.4),
            ("sipp-blend", (9, 20), 0.5),
            ("repaired", (9, 20), 0.2),
        ]
    ):
        own = replace(certificate(epsilon), dense_hash="a" * 64)
        more: dict[str, Any] = (
            {"method": arm} if arm != "repaired" else {"method": "magnitude", "repair": repaired(0.1)}
        )
        moved = OutputChange(2 * epsilon, 10, is_held_back=True)
        made = pruned_folder(nets / f"n{index}", kept=kept, certificate=own, moved=moved, **more)
        hashes = {key: getattr(own, key) for key in ("dense_hash", "pruned_hash")}
        (made / "eval.json").write_text(evaluation(0.9, 0.9 - epsilon / 5, **hashes))
    return {
        "run": render(*read_results([run])),
        "nets": render(*read_results([nets])),
        "one": render(*read_results([nets / "n3"])),
    }


@pytest.fixture(scope="module")
def seen(pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Visit]:
    """The page of a run at every width, the others at the least and the widest; dark at the widest."""
    base = tmp_path_factory.mktemp("seen")
    return {
        (name, width): visit(page, base / f"{name}{width}", width=width, steps=SURVEY, dark=width == WIDTHS[-1])
        for name, page in pages.items()
        for width in (WIDTHS if name == "run" else WIDTHS[::2])
    }


def test_nothing_is_cut_off_or_overlaps_at_any_width(seen: dict[tuple[str, int], Visit]) -> None:
    for place, found in seen.items():
        assert found.problems() == [], place
        assert found.seen["cut"] == [] and found.seen["overlapping"] == [], place


def test_the_first_plot_lies_within_one_screen_of_a_phone(seen: dict[tuple[str, int], Visit]) -> None:
    for name in ("run", "nets"):
        assert 100 < seen[name, WIDTHS[0]].seen["first"] <= ONE_SCREEN, name
    assert 100 < seen["one", WIDTHS[0]].seen["lead"] <= ONE_SCREEN  # accuracy, size, speed, guarantee


def test_layers_are_named_at_every_width(seen: dict[tuple[str, int], Visit]) -> None:
    for width in WIDTHS:
        names = seen["run", width].seen["names"]
        shown = names["part0-layers"]
        assert len(shown) % N_LAYERS == 0 and len(set(shown)) == N_LAYERS, width
        assert names["part0-layers"][0] == "layers.0.conv1"
    for width in WIDTHS[::2]:
        assert seen["one", width].seen["names"]["network0-layers-table0"] == ["0.weight", "1.weight"]


def test_one_heading_a_section_and_origins_closed(seen: dict[tuple[str, int], Visit]) -> None:
    for place, found in seen.items():
        assert set(found.seen["headings"]) == {1} and found.seen["captions"] == [], place
        assert found.seen["open"] == 0, place


def test_a_theory_that_is_not_met_is_folded_away(seen: dict[tuple[str, int], Visit]) -> None:
    assert seen["one", WIDTHS[-1]].seen["cards"] == ["Theory, network: useless here"]


def test_a_certificate_of_the_whole_output_is_marked(seen: dict[tuple[str, int], Visit], pages: dict[str, str]) -> None:
    assert seen["nets", WIDTHS[-1]].seen["worthless"] == ["Useless certificate of the output"]  # that of 125 %
    assert "125 %: useless" in pages["nets"] and "certificate is useless: it allows an error of 125 %" in pages["nets"]
    assert '"useless":1.0' in pages["nets"] and seen["one", WIDTHS[-1]].seen["worthless"] == []


def test_networks_of_one_parent_are_overlaid(seen: dict[tuple[str, int], Visit], pages: dict[str, str]) -> None:
    found = seen["nets", WIDTHS[-1]].seen
    assert (
        found["series"]["networks-moved"] == found["series"]["networks-certified"] == 3
    )  # magnitude, blend, magnitude repaired
    assert "At keep 21.3 %, magnitude repaired is most accurate" in pages["nets"]
    assert [found["sections"].count(name) for name in ("Comparison", "In short", "Repair")] == [1, 4, 1]


def test_repair_has_its_section(seen: dict[tuple[str, int], Visit], pages: dict[str, str]) -> None:
    found = ["In short", "Measured", "Layers", "Repair", "Statements", "Origin"]
    assert seen["one", WIDTHS[0]].seen["sections"] == found
    text = html.unescape(pages["one"])
    assert "0.8 before repair, 0.1 after" in text and "1 of 2 layers refitted" in text
    assert "1.weight (its input is not seen)" in text
    assert seen["one", WIDTHS[0]].seen["names"]["network0-repair-table0"] == ["0.weight", "1.weight"]


def test_layers_that_differ_have_different_names_at_every_width(pages: dict[str, str], tmp_path: Path) -> None:
    """Names of layers of a transformer, and invented ones, in as many letters as a phone and a desk have room for."""
    ends = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
    names = [f"bert.encoder.layer.{i}.{end}.weight" for i in range(12) for end in ends]
    steps = f"const GIVEN = {json.dumps([*names, 'classifier.weight'])};\n{NAMES}"
    found = visit(pages["one"], tmp_path, width=800, steps=steps).seen
    assert len(found["made"]) == 200
    assert all(n_names == n_short == n_axis and longest <= n for n_names, n_short, n_axis, n, longest in found["made"])
    assert [len(set(texts)) for texts in found["given"]] == [49, 49, 49]
    assert [texts[1] for texts in found["given"]] == [
        "b.e.l.0.a.o.dense",
        "b.e.l.0.attention.output.dense",
        "bert.encoder.layer.0.attention.output.dense",
    ]


def test_a_repaired_network_is_hollow_and_nothing_is_hatched(seen: dict[tuple[str, int], Visit]) -> None:
    found = seen["nets", WIDTHS[-1]].seen
    assert found["hollow"]["networks-moved"] == {"magnitude": 0, "sipp-blend": 0, "magnitude repaired": 1}
    dashes = found["dashes"]["networks-moved"]
    assert len(set(dashes.values())) == 3
    assert "hatch" not in CSS


@pytest.mark.skipif(not AXE.is_file(), reason="AXE_CORE names no axe.min.js (npm pack axe-core)")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["run", "nets", "one"])
def test_no_serious_accessibility_fault(pages: dict[str, str], tmp_path: Path, name: str, dark: bool) -> None:
    for width in WIDTHS:
        found = visit(pages[name], tmp_path / str(width), width=width, steps=AXE.read_text() + RUN_AXE, dark=dark)
        assert found.problems() == [] and found.seen == [], width


@pytest.mark.skipif(not AXE.is_file(), reason="AXE_CORE names no axe.min.js (npm pack axe-core)")
def test_axe_finds_a_fault(pages: dict[str, str], tmp_path: Path) -> None:
    broken = pages["one"].replace("</main>", "<select><option>x</option></select></main>")
    assert visit(broken, tmp_path, width=WIDTHS[-1], steps=AXE.read_text() + RUN_AXE).seen != []
