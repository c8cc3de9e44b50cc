"""Certificates on the page: one about tokens is no error of the output; "useless" is what the record says."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.synthetic import certificate
from report.test_result_folders import pruned_folder

from sipp.report import read_pruned_result
from sipp.report.compare_networks import comparisons_of, networks_table
from sipp.results import Certificate, to_json
from sipp_lab.page import read_results, render


def of_measure(measure: Any, epsilon: float) -> Certificate:
    return replace(certificate(epsilon), measure=measure)


def page(folder: Path, **changes: Any) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The page of a network, its tiles, and the card of its certificate."""
    text = render(*read_results([pruned_folder(folder, **changes)]))
    tiles = dict(re.findall(r"<dt[^>]*>(.*?)</dt><dd>(.*?)<span", text))
    plots = json.loads(text.split('id="data">')[1].split("</script>")[0])["plots"]
    return text, tiles, plots["network0-statements"]["views"][0]


@pytest.mark.parametrize(
    ("measure", "epsilon", "limit", "words"),
    [
        ("kl", 0.0123, "0.0123 nats", "the next token&#x27;s distribution is within 0.0123 nats"),
        ("kl", 1.5, "1.5 nats", "the next token&#x27;s distribution is within 1.5 nats"),
        (
            "next-token",
            0.03,
            "3 % of positions",
            "a different next token at no more than 3 % of positions",
        ),
    ],
)
def test_a_certificate_about_tokens_is_told_in_its_own_unit(
    tmp_path: Path, measure: str, epsilon: float, limit: str, words: str
) -> None:
    text, tiles, card = page(tmp_path / "net", certificate=of_measure(measure, epsilon))
    assert tiles["guarantee"] == f"within {limit}" and words in text.replace("&#39;", "&#x27;")
    assert limit in card["text"] and not card["useless"]
    assert "of the original" not in text and "of the output&#x27;s length" not in text


def test_tokens_are_not_compared_with_errors_of_the_output(tmp_path: Path) -> None:
    made = [("kl", 0.5), ("output", 0.2), ("next-token", 0.1)]
    models = [
        read_pruned_result(pruned_folder(tmp_path / measure, certificate=of_measure(measure, epsilon)))
        for measure, epsilon in made
    ]
    assert [model.certified_error for model in models] == [None, 0.2, None]
    (drawn,) = [one for one in comparisons_of(models, {}) if one.key == "certified"]
    assert [point.mean for curve in drawn.curves for point in curve.points] == [0.2]
    table = networks_table(models, {})
    column = table.head.index("certified within") - 1
    assert {cells[column].text for _, cells in table.rows} == {"0.5 nats", "20 %", "10 % of positions"}
    assert not any(cells[column].tone for _, cells in table.rows)


def test_an_epsilon_that_was_asked_for_and_not_certified_is_no_limit(tmp_path: Path) -> None:
    asked = replace(certificate(0.1, verdict="not certified"), fixed="epsilon")
    model = read_pruned_result(pruned_folder(tmp_path / "net", certificate=asked))
    assert model.certified_error is None


def test_of_several_certificates_the_weakest_counts(tmp_path: Path) -> None:
    """The best of several is not a claim at their confidence."""
    own = certificate(0.2)
    folder = pruned_folder(tmp_path / "net", certificate=own)
    later = replace(certificate(0.5), dense_hash=own.dense_hash)
    (folder / "c.json").write_text(json.dumps({"kind": "Certificate", **to_json(later)}))
    assert read_pruned_result(folder).certified_error == 0.5


@pytest.mark.parametrize("epsilon", [0.5, 0.95, 1.0, 1.25])
def test_page_and_record_agree_on_what_is_useless(tmp_path: Path, epsilon: float) -> None:
    cert = certificate(epsilon)
    text, tiles, card = page(tmp_path / "net", certificate=cert)
    assert card["useless"] == (tiles["guarantee"] == "useless") == ("certificate is useless" in text) == cert.is_useless
    assert ("True but useless" in card["text"]) == card["useless"]
    cell = networks_table([read_pruned_result(tmp_path / "net")], {}).rows[0][1][4]
    assert ("useless" in cell.text) == bool(cell.tone) == cert.is_useless
