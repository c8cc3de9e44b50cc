"""The tables a page begins with: numbers of the records, the choice that follows from them, networks side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_zoo import mlp
from commandline import run
from report.synthetic import big_run
from safetensors.torch import save_file

from sipp.report import tone_of
from sipp.report.compare_networks import networks_table
from sipp.report.contents import TableCell
from sipp.report.results import read_pruned_result
from sipp.results import words
from sipp_lab.page import read_results, render
from sipp_lab.page.run_article import best_choice, method_table
from sipp_lab.runs.folder import read_run


def test_the_table_has_every_method_at_every_keep(tmp_path: Path) -> None:
    found = read_run(big_run(tmp_path / "run", methods=("magnitude", "sipp-blend"), n_levels=3, n_seeds=2, n_layers=2))
    table = method_table(found)
    assert (
        table is not None and [name for name, _ in table.rows] == ["magnitude", "sipp-blend"] and len(table.head) == 5
    )
    records = [r for r in found.records if r.method == "magnitude" and r.level == 1]
    mean = sum(r.after.top1 for r in records) / len(records)
    assert table.rows[0][1][1].text == f"{100 * mean:.1f}"
    choice = best_choice(found)
    page = render([found])
    assert choice is not None and choice.heading in page and page.index(choice.heading) < page.index("data-plot")


@pytest.mark.parametrize(("change", "tone"), [(0.01, "t0"), (-0.004, "t0"), (-0.009, "t1"), (-0.5, "t4")])
def test_tones_follow_what_was_lost(change: float, tone: str) -> None:
    assert tone_of(change) == tone


@pytest.fixture
def networks(tmp_path: Path) -> Path:
    """Two networks of `sipp prune`, one with a certificate of `sipp certify` beside it."""
    torch.manual_seed(0)
    save_file({"inputs": torch.randn(200, 6)}, tmp_path / "data.safetensors")
    save_file({"inputs": torch.randn(400, 6)}, tmp_path / "new.safetensors")
    save_file(mlp().state_dict(), tmp_path / "dense.safetensors")
    model = ["--model", "cli_zoo:mlp"]
    for keep in (0.5, 0.9):
        words = ["--data", tmp_path / "data.safetensors", "--keep", keep, "--out", tmp_path / "nets" / f"k{keep}"]
        assert run("prune", *model, "--weights", tmp_path / "dense.safetensors", *words).returncode == 0
    one = tmp_path / "nets" / "k0.9"
    done = run(
        "certify", *model, "--dense", tmp_path / "dense.safetensors", "--pruned", one, "--holdout",
        tmp_path / "new.safetensors", "--out", one / "certificate.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tmp_path / "nets"


def test_networks_stand_side_by_side_with_their_certificates(networks: Path, tmp_path: Path) -> None:
    results = read_results([networks])
    table = networks_table(results)  # type: ignore[arg-type]
    assert [name for name, _ in table.rows] == ["k0.9", "k0.5"]
    certificate = json.loads((networks / "k0.9" / "certificate.json").read_text())
    assert (
        table.rows[0][1][-1] == TableCell(words.percent_up(certificate["epsilon"]))
        and table.rows[1][1][-1].text == "none"
    )
    page = render(results)
    assert "Networks side by side" in page and page.index("networks0-moved") < page.index("part0-layers")
    assert "Certificate (certificate.json)" in page  # on the page of its network, under the name of its file


def test_a_certificate_of_another_network_is_marked_and_not_shown(networks: Path) -> None:
    (networks / "k0.5" / "certificate.json").write_bytes((networks / "k0.9" / "certificate.json").read_bytes())
    (networks / "k0.5" / "notes.json").write_text("[1]")
    found = read_pruned_result(networks / "k0.5")
    assert found.certificates == {} and any("other networks" in mark for mark in found.notes)
    real = read_pruned_result(networks / "k0.9")
    assert real.certificates and not real.notes
