"""What `sipp eval --out` wrote, on the page of one network and in the comparison of several."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report.synthetic import STAND_IN_HASH, certificate, evaluation
from report.test_first_screen import BENCH
from report.test_result_folders import pruned_folder

from sipp.files import seal
from sipp.report import PrunedModel, read_pruned_result
from sipp.report.compare_networks import common_evaluations, comparisons_of, networks_table
from sipp.report.one_network import next_steps, tiles_of
from sipp.results import AccuracyCertificate, Evaluation, Repair, TextScores, to_json, words
from sipp_lab.page import read_results, render

REPAIR = Repair((), 10, 5, 0, None, None, None, None, "")


ABOUT = {"dense_hash": "0" * 64, "pruned_hash": STAND_IN_HASH, "data_hash": "a" * 64, "inputs": "some inputs"}


def record_of(measured: Evaluation | TextScores) -> str:
    """What `sipp eval --out` writes of it."""
    return json.dumps(seal({"kind": type(measured).__name__, "sipp": "0", **to_json(measured), **ABOUT}))


def network(folder: Path, *records: str, **changes: Any) -> Path:
    """A pruned network with these evaluations beside it."""
    made = pruned_folder(folder, **changes)
    for index, text in enumerate(records):
        (made / f"eval{index}.json").write_text(text)
    return made


def shown(*folders: Path) -> str:
    return render(*read_results(folders))


def test_a_network_has_its_accuracy_on_its_page(tmp_path: Path) -> None:
    page = shown(network(tmp_path / "net", evaluation(0.9, 0.875)))
    assert "Accuracy 87.50% after pruning, 90.00% before" in page
    tiles = dict(re.findall(r"<dt[^>]*>(.*?)</dt><dd>(.*?)<span", page))
    assert tiles["accuracy"] == "90 % \u2192 87.5 %" and tiles["output error"] == "20 %"
    assert "accuracy is 87.5 % (before: 90 %)" in page
    (card,) = json.loads(page.split('id="data">')[1].split("</script>")[0])["plots"]["network0-measured0-facts"][
        "views"
    ]
    assert ["inputs", "300 points of a.npz"] in card["rows"]
    assert ["accuracy", "87.50% pruned, 90.00% dense (-2.50 percentage points)"] in card["rows"]
    assert ["loss", "0.625 pruned, 0.5 dense (cross-entropy)"] in card["rows"]
    assert "after pruning, " not in shown(network(tmp_path / "other"))


def test_without_labels_the_error_is_said_and_no_accuracy(tmp_path: Path) -> None:
    page = shown(network(tmp_path / "net", evaluation(None, None)))
    assert "The output error is 20 % on average" in page
    assert "sipp eval measures it on data with labels" in page and "Measure its accuracy on new data" in page
    infinite = Evaluation(300, None, None, 0.75, math.inf, 0.1, math.inf, n_not_finite=7)
    page = shown(network(tmp_path / "nan", record_of(infinite)))
    assert "An output is not finite on 7 inputs" in page and "not finite on 7 of 300 inputs" in page


def test_a_language_model_has_its_perplexity_on_its_page(tmp_path: Path) -> None:
    scores = TextScores(12, 64, 700, loss=3.0, dense_loss=2.5, kl=0.25, same_token=0.75)
    page = shown(network(tmp_path / "net", record_of(scores)))
    assert "Perplexity 20.09, dense 12.18" in page and "the perplexity is 20.09 (before: 12.18)" in page
    tiles = dict(re.findall(r"<dt[^>]*>(.*?)</dt><dd>(.*?)<span", page))
    assert tiles["perplexity"] == "12.18 \u2192 20.09" and "0.25 nats per token" in page
    assert "Measure its accuracy" not in page and "not finite" not in page


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({"pruned_hash": "1" * 64}, "is about other networks and is not shown."),
        ({"dense_hash": "1" * 64}, "is about other networks and is not shown."),
        ({"inputs": None}, "could not be read (eval0.json: 'inputs' must be text, found None)."),
        ({"error_mean": "many"}, "could not be read (eval0.json: 'error_mean' must be a number, found 'many')."),
    ],
)
def test_evaluations_of_other_networks_or_with_faults_are_not_shown(
    tmp_path: Path, changes: dict[str, Any], mark: str
) -> None:
    found = read_pruned_result(network(tmp_path / "net", evaluation(0.9, 0.875, **changes)))
    assert found.evaluation is None and found.notes[-1] == f"eval0.json {mark}"


@pytest.fixture
def several(tmp_path: Path) -> list[Path]:
    """Three networks of one parent: two were measured on the same points, one of them on more points too."""
    return [
        network(
            tmp_path / "magnitude",
            evaluation(0.9, 0.8),
            evaluation(0.5, 0.4, points="b", n_inputs=900),
            method="magnitude",
        ),
        network(tmp_path / "magnitude-r", evaluation(0.9, 0.85), method="magnitude", repair=REPAIR),
        network(tmp_path / "lamp", evaluation(0.5, 0.45, points="c"), method="lamp", kept=(5, 5)),
    ]


def test_networks_are_compared_on_the_same_points_only(several: list[Path]) -> None:
    models = [one for one in read_results(several)[0] if isinstance(one, PrunedModel)]
    table = networks_table(models, common_evaluations(models))
    assert "Accuracy: on 300 points of a.npz." in table.caption
    at = [table.head.index(name) - 1 for name in ("accuracy", "accuracy, dense")]
    cells = {name: tuple(row[i].text for i in at) for name, row in table.rows}
    assert cells == {
        "magnitude": ("80 %", "90 %"),
        "magnitude-r": ("85 %", "90 %"),
        "lamp": ("not measured", "not measured"),
    }
    accuracy = comparisons_of(models, common_evaluations(models))[0]
    curves = {curve.method: [point.mean for point in curve.points] for curve in accuracy.curves}
    assert curves == {"magnitude": [0.8], "magnitude repaired": [0.85]} and accuracy.dense == 0.9


def test_the_comparison_says_which_is_most_accurate_and_draws_it(several: list[Path]) -> None:
    page = shown(*several)
    assert (
        "At keep 21.3 %, magnitude repaired is most accurate" in page and "Accuracy 85 %; magnitude has 80 %." in page
    )
    plot = json.loads(page.split('id="data">')[1].split("</script>")[0])["plots"]["networks-accuracy"]
    assert plot["views"]["reference"] == {"label": "dense", "value": 0.9} and not plot["views"]["y"]["log"]


def certificate_text(claim: AccuracyCertificate) -> str:
    return json.dumps({"kind": type(claim).__name__, **to_json(claim)})


def accuracy_claim(n_lost: int = 9) -> AccuracyCertificate:
    return AccuracyCertificate(
        mode="labels", confidence=0.95, n_lost=n_lost, n_gained=4, n_differ=20, n=300, n_duplicates=0,
        data_hash="a" * 64, dense_hash="0" * 64, pruned_hash=STAND_IN_HASH, dtype="float32", output=None,
        calibration_checked=True,
    )  # fmt: skip


def test_a_certified_accuracy_is_in_the_first_tiles_in_percentage_points(tmp_path: Path) -> None:
    """Beside a certificate of the outputs too; of two the one that allows more, and no advice to make one."""
    own = replace(certificate(0.0421), dense_hash="0" * 64)
    folder = pruned_folder(tmp_path / "net", certificate=own)
    (folder / "eval.json").write_text(evaluation(0.9, 0.875))
    (folder / "accuracy.json").write_text(certificate_text(accuracy_claim()))
    (folder / "other.json").write_text(certificate_text(accuracy_claim(n_lost=5)))
    (result,), _ = read_results([folder])
    assert isinstance(result, PrunedModel)
    ((_, value, said),) = [one for one in tiles_of(result) if one[0] == "guarantee"]
    drop = words.points_up(accuracy_claim().drop_upper)
    assert drop.endswith(" percentage points") and value == f"drop at most {drop.replace('percentage ', '')}"
    assert f"lowers the accuracy by at most {drop} (95 % confidence). For all but 5 %" in said and "4.21 %" in said
    page = shown(folder)
    assert "use sipp certify" not in page and "sipp certify --accuracy" not in page
    assert f"{words.percent_up(accuracy_claim().drop_upper)} " not in page


def test_the_next_steps_are_lines_that_work_where_the_reader_is(tmp_path: Path) -> None:
    own = replace(certificate(0.0421), dense_hash="0" * 64)
    for name, more, lines in (
        ("shell", {"model": "my:net", "weights": "my.pt", "rest": {"asked": {}}}, (
            f"sipp export {tmp_path / 'shell'} --model my:net --out small.safetensors",
            'fast = sipp.sparse(sipp.load("small.safetensors", into=model), example)',
        )),
        ("program", {"model": "torch.nn.Linear"}, ("sipp.save(pruned, ", "fast = sipp.sparse(pruned, example)")),
    ):  # fmt: skip
        folder = pruned_folder(tmp_path / name, certificate=own, **more)
        (folder / "eval.json").write_text(evaluation(0.9, 0.9))
        (folder / "bench.json").write_text(json.dumps(seal(BENCH)))
        (result,), _ = read_results([folder])
        assert isinstance(result, PrunedModel)
        steps = [command for _, command in next_steps(result)]
        assert len(steps) == 2 and all(found.startswith(line) for found, line in zip(steps, lines)), steps


def test_a_certified_drop_of_accuracy_has_its_column(several: list[Path]) -> None:
    claim = accuracy_claim()
    for has_claim in (False, True):
        models = [one for one in read_results(several)[0] if isinstance(one, PrunedModel)]
        table = networks_table(models, common_evaluations(models))
        assert ("certified drop" in table.head) == has_claim
        (several[1] / "accuracy.json").write_text(certificate_text(claim))
    limit = math.ceil(1e4 * claim.drop_upper) / 100
    assert {name: row[-1].text for name, row in table.rows} == {
        "magnitude": "none",
        "magnitude-r": f"{limit:g} points",
        "lamp": "none",
    }


def test_a_language_model_is_measured_by_its_perplexity(tmp_path: Path) -> None:
    folder = pruned_folder(tmp_path / "net", model="hf:stories", rest={"asked": {}, "data": {"kind": "text"}})
    (result,), _ = read_results([folder])
    assert isinstance(result, PrunedModel)
    assert tiles_of(result)[0][0] == "perplexity" and "perplexity" in next_steps(result)[0][0]
    assert "with labels" not in shown(folder)
