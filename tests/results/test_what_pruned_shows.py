"""How a pruned network shows itself: short in a shell, folded in a notebook, a table that explains its columns."""

from __future__ import annotations

import pytest
import torch
from shorter import narrow_resnets
from torch import nn

import sipp
from sipp.results import words
from sipp_lab.nets import build


@pytest.fixture(scope="module")
def pruned() -> sipp.Pruned:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("<encoder>_of_a_network_whose_modules_have_long_names", nn.Linear(8, 16))
    net.add_module("relu", nn.ReLU())
    net.add_module("head", nn.Linear(16, 4))
    return sipp.prune(net, torch.rand(50, 8), keep=0.5, method="sipp-hybrid")


def test_the_table_has_names_in_full_and_explains_its_columns(pruned: sipp.Pruned) -> None:
    for text in (str(pruned), pruned.details):
        (row,) = (line for line in text.splitlines() if "<encoder>" in line)
        assert row.split()[0] == pruned.layers[0].name
        assert "rows: " in text and "fan-in: " in text
    for word in ("eps: ", "Delta: ", "layer bound: "):
        assert word in " ".join(pruned.details.split())


def lines_of(text: str, label: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{label}:")]


@pytest.mark.filterwarnings("ignore")
def test_a_resnet20_fits_a_screen_and_says_first_what_a_person_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    narrow_resnets(monkeypatch)
    net = build("resnet20").eval()
    pruned = sipp.prune(net, torch.rand(16, 3, 8, 8), keep=0.3, method="sipp-det", repair=True)
    lines = str(pruned).splitlines()
    assert len(lines) <= 25 and len(pruned.details.splitlines()) > 25
    order = [lines.index(lines_of(str(pruned), label)[0]) for label in ("error", "repair", "theory", "next")]
    table = next(i for i, line in enumerate(lines) if line.strip().startswith("weight"))
    assert f"{pruned.kept:,} of {pruned.n_weights:,}" in lines[0] and order == sorted(order) and order[-1] < table
    shown = [layer.name for layer in pruned.layers if f" {layer.name} " in str(pruned)]
    assert shown == [layer.name for layer in (*pruned.layers[:4], *pruned.layers[-4:])]
    assert f"... {len(pruned.layers) - 8} more" in str(pruned) and "pruned.details" in lines[-1]
    assert all(f" {layer.name} " in pruned.details for layer in pruned.layers)


def test_a_bound_that_says_nothing_is_one_line_and_one_that_does_is_shown_in_full() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for keep, is_useful in ((0.5, False), (0.99, True)):
        pruned = sipp.prune(net, torch.rand(400, 8), keep=keep, method="sipp-det", holdout=torch.rand(100, 8))
        assert pruned.measured is not None and pruned.measured.epsilon is not None
        assert (pruned.measured.epsilon < 1) == is_useful  # both sides are met
        text, whole = " ".join(str(pruned).split()), " ".join(pruned.details.split())
        assert (pruned.measured.sentence in text) == is_useful == ("layer bound:" in text)
        assert ("theory: no useful bound for this network: " in text) == (not is_useful)
        for layer in pruned.layers:
            (cells,) = (line.split() for line in str(pruned).splitlines() if line.split()[:1] == [layer.name])
            assert all(words.number_up(eps) in cells for eps in (layer.eps, layer.eps_measured) if is_useful)
        assert all(part.sentence in whole for part in (pruned.measured, pruned.bound, pruned.guarantee))
