"""Every result prints, is a view in a notebook with the same numbers, and goes to JSON and back."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import is_dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sipp
from sipp.results import (
    Bench,
    BenchRun,
    Evaluation,
    Pruned,
    SavedFile,
    Speed,
    StoredTensor,
    Table,
    TextScores,
    from_json,
    to_json,
)
from sipp.results.sheet import table_text


def points(seed: int, n: int = 120) -> torch.Tensor:
    return torch.rand(n, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("records")
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    labelled = [(points(3), torch.arange(120) % 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruned = sipp.prune(net, points(1), keep=0.5, repair=True, holdout=points(7))
        certificate = sipp.certify(net, pruned, points(2))
        found = {
            "Pruned": pruned,
            "PrunedTo": sipp.prune_to(net, points(1), points(4), epsilon=0.9, method="magnitude"),
            "Comparison": sipp.compare(net, labelled, keeps=(0.8, 0.5), methods=("magnitude", "random"), repair=True),
            "Certificate": certificate,
            "AccuracyCertificate": sipp.certify_accuracy(net, pruned, points(5)),
            "with labels": sipp.certify_accuracy(net, pruned, labelled),
            "SavedFile": sipp.save(pruned, folder / "net.safetensors", values="int8"),
            "Repair": pruned.repair,
            "BlendChoice": pruned.choice,
            "Assumption": sipp.check_assumption(net, points(1)),
            "NetworkBound": pruned.bound,
            "Guarantee": pruned.guarantee,
            "Measured": pruned.measured,
            "Exported": sipp.export(pruned, folder / "net.onnx", torch.rand(2, 8)),
            "Gradual": sipp.gradual(net, lambda step: None, points(1), keep=0.3, steps=10),
            "Sparse": sipp.sparse(pruned, points(6, 4)),
            "Shrunk": sipp.shrink(pruned, points(6, 4)),
            "Evaluation": Evaluation(100, (0.9, 0.8), (0.25, 0.5), 0.875, 0.125, 0.0625, 1.5),
            "Bench": Bench(
                "a machine",
                2,
                "net",
                "0" * 64,
                1000,
                8000,
                900.5,
                1500,
                8000,
                (BenchRun(64, 4.0, 2.0, Speed(2.0, 1.9, 2.1), 1e-6),),
            ),
            "TextScores": TextScores(
                n_windows=3, window=8, n_tokens=21, loss=2.0, dense_loss=1.5, kl=0.25, same_token=0.75
            ),
        }
    return found


NAMES = (
    "Pruned", "PrunedTo", "Comparison", "Certificate", "AccuracyCertificate", "with labels",
    "SavedFile", "Repair", "BlendChoice", "Assumption", "NetworkBound", "Guarantee", "Measured", "Exported", "Gradual",
    "Sparse", "Shrunk", "TextScores", "Evaluation", "Bench",
)  # fmt: skip
WITH_BARS = {
    "Pruned", "PrunedTo", "Comparison", "SavedFile", "Repair", "BlendChoice", "Assumption", "Gradual", "Sparse",
    "Shrunk", "Bench",
}  # fmt: skip


class Page(HTMLParser):
    """The text of HTML whose tags fit together, and the lengths of its bars."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.bars: list[float] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        style = dict(attrs).get("style") or ""
        if found := re.search(r"width:([\d.e+-]+)%", style):
            self.bars.append(float(found[1]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


@pytest.mark.parametrize("name", NAMES)
def test_every_result_prints_and_has_a_view_with_the_numbers_of_its_text(name: str, records: dict[str, Any]) -> None:
    record = records[name]
    page, text = Page(record._repr_html_()), str(record)
    assert numbers(text) <= numbers(" ".join(page.texts)), name
    assert bool(page.bars) == (name in WITH_BARS) and all(0 <= one <= 100 for one in page.bars)
    assert all(len(line) <= 120 for line in text.splitlines() if "/" not in line)
    shown = repr(record)  # in a shell: one line
    assert shown.startswith(f"<{type(record).__name__} ") and "\n" not in shown and len(shown) < 300


# a file is read by `sipp.inspect`, the steps of a compiled network are its own
NOT_READ = {"Sparse", "Comparison", "SavedFile", "PrunedTo", "Shrunk", "Gradual"}


@pytest.mark.parametrize("name", NAMES)
def test_every_result_goes_to_json_and_back(name: str, records: dict[str, Any]) -> None:
    record = records[name]
    if not is_dataclass(record):
        pytest.skip("it is a program, not a record")
    if name == "SavedFile":
        pytest.skip("its statements are those of the file's index")
    values = json.loads(json.dumps(to_json(record), allow_nan=False))
    assert values.keys() >= set(getattr(record, "ALSO_IN_JSON", ()))
    if name in NOT_READ:
        return
    kind = Pruned if name == "Pruned" else type(record)
    again = from_json(kind, values, name)
    assert to_json(again) == values and (name == "Pruned" or again == record or "nan" in str(values))
    assert str(again) == str(record)


def test_all_records_that_print_are_tried(records: dict[str, Any]) -> None:
    assert set(records) == set(NAMES) and {type(one).__name__ for one in records.values()} == {*NAMES} - {"with labels"}


def test_printed_text_is_whole_where_rich_sees_a_notebook(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich would show the table at once, above the text that it belongs to."""
    before = {name: str(one) for name, one in records.items()}
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert {name: str(one) for name, one in records.items()} == before


def test_long_names_leave_numbers_whole(tmp_path: Path) -> None:
    """A Hugging Face network has names of fifty letters, and numbers of eight digits."""
    tensors = tuple(
        StoredTensor(
            names=(f"model.decoder.layers.{i}.self_attn.output_projection.weight",), shape=(4096, 3073),
            dtype="float32", kept=6_292_736, positions="bitmask", values="exact", mask="stored",
            lengths=(12_585_472, 25_170_944, 0, 0), largest_change=0.1, norm_change=0.1,
        )
        for i in range(3)
    )  # fmt: skip
    shown = SavedFile(
        path=tmp_path / "net", model="Net", n_bytes=10**8, pruned_hash="0" * 64, precision="int8", tensors=tensors
    )
    text = str(shown)
    assert "12,587,008" in text and "37,756,416" in text and "positions" in text and "values" in text
    assert all(tensor.names[0] in text for tensor in tensors)
    names, numbers = [f"{i}{'name' * 20}" for i in range(2)], ("12,585,472", "1,234,567,890") * 2
    table = Table(("weight", *"abcd"), tuple((name, *numbers) for name in names))
    assert all(number in table_text(table) for number in (*names, *numbers))
