"""How a pruned network shows itself: short in a shell, folded in a notebook, a table that explains its columns."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sipp
from sipp.display import NAME_LENGTH, short_names


@pytest.fixture(scope="module")
def pruned() -> sipp.Pruned:
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("<encoder>_of_a_network_whose_modules_have_long_names", nn.Linear(8, 16))
    net.add_module("relu", nn.ReLU())
    net.add_module("head", nn.Linear(16, 4))
    return sipp.prune(net, torch.rand(50, 8), keep=0.5, method="sipp-hybrid")


def test_repr_is_one_short_line_and_says_what_it_is(pruned: sipp.Pruned) -> None:
    text = repr(pruned)
    assert len(text) < 150 and "\n" not in text
    assert "Sequential" in text and "sipp-hybrid" in text and "96 of 192" in text and "50.00%" in text


def test_a_notebook_shows_all_of_it_as_whole_html(pruned: sipp.Pruned) -> None:
    seen: list[str] = []
    depth: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            depth.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert depth.pop() == tag

        def handle_data(self, data: str) -> None:
            seen.append(data)

    Check().feed(pruned._repr_html_())
    assert not depth
    text = "".join(seen)
    assert str(pruned).splitlines()[0] in text and "head.weight" in text and "<encoder>" in text  # escaped, not lost


def test_the_table_shortens_names_and_explains_its_columns(pruned: sipp.Pruned) -> None:
    text = str(pruned)
    (row,) = (line for line in text.splitlines() if "<encoder>" in line)
    assert row.split()[0] == short_names([layer.name for layer in pruned.layers])[0]
    assert all(len(line) <= 120 for line in text.splitlines())
    for word in ("eps: ", "Delta: ", "layer bound: ", "det: "):
        assert word in text


def test_short_names_keep_both_ends() -> None:
    long = "transformer.encoder.layers.11.attention.self.query.weight"
    whole, short = short_names(["0.weight", long])
    assert whole == "0.weight" and len(short) == NAME_LENGTH
    assert short.startswith("transformer.") and short.endswith("query.weight")


BERT = [
    f"bert.encoder.layer.{i}.{part}.weight"
    for i in range(12)
    for part in (
        "attention.self.query",
        "attention.self.key",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    )
]


def test_the_blocks_of_a_transformer_stay_different_and_keep_their_numbers() -> None:
    short = short_names([*BERT, "classifier.weight"])
    assert len(set(short)) == len(BERT) + 1 and max(map(len, short)) <= NAME_LENGTH and short[-1] == "classifier.weight"
    assert short[:2] == ["b.e.l.0.a.self.query.weight", "b.e.l.0.a.self.key.weight"]
    assert short[-2] == "b.e.l.11.output.dense.weight"


def test_a_number_at_the_end_is_free() -> None:
    names = ["abcy" + "x" * 20, "abcz" + "x" * 20, "abc....1"]
    assert short_names(names, 8) == ["abc....4", "abc....2", "abc....1"]


PARTS = st.lists(
    st.sampled_from(["0", "11", "encoder", "encodes", "a", "...", "weight", "é…", "\n", "x" * 40]), min_size=1
)


@given(st.lists(PARTS.map(".".join), unique=True), st.integers(8, 40))
@settings(max_examples=100, deadline=None)
def test_names_that_differ_stay_different(names: list[str], length: int) -> None:
    short = short_names(names, length)
    assert len(set(short)) == len(names)
    assert all(len(one) <= length for one in short)


def test_baselines_have_no_words_for_columns_they_do_not_show() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    assert "Delta: " not in str(sipp.prune(net, None, keep=0.5, method="wt"))


def test_no_number_is_cut_in_a_wide_table() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1000, 2000), nn.ReLU(), nn.Linear(2000, 4))
    text = str(sipp.prune(net, torch.rand(20, 1000), keep=0.01, method="sipp-hybrid"))
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and "2000" in text
