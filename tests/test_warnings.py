"""Warnings are told apart by their class: nobody looks for our own English in them."""

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import sipp
from sipp.errors import DeadRowsWarning

SOURCE = Path(__file__).parent.parent / "src" / "sipp"
FILTERS = ("filterwarnings", "simplefilter", "catch_warnings")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def test_dead_rows_and_dead_layers_warn_with_a_class_of_their_own() -> None:
    for budget in (1, 10):
        with pytest.warns(DeadRowsWarning, match="lost all"):
            sipp.prune(net(), None, budget=budget, method="magnitude")
    assert issubclass(DeadRowsWarning, UserWarning)


def test_compare_counts_dead_rows_and_does_not_warn_of_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sipp.compare(net(), torch.rand(60, 8), keeps=(0.3, 0.02), methods=("magnitude", "random"), repair=True)
    assert max(row.dead_rows for row in found.rows) > 0


def test_prune_to_with_repair_warns_once_of_dead_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from sipp.verbs import prune_to as tolerance

    def cut(*args: object, **options: object) -> object:
        warnings.warn("something else", stacklevel=2)
        return plain(*args, **options)  # type: ignore[arg-type]

    plain = tolerance.cut
    monkeypatch.setattr(tolerance, "cut", cut)
    x = torch.rand(100, 8)
    with pytest.warns(UserWarning, match="something else") as told:
        sipp.prune_to(net(), x[:50], x[50:], epsilon=3.0, share=0.5, method="magnitude", repair=True, progress=False)
    texts = [str(one.message) for one in told if issubclass(one.category, DeadRowsWarning)]
    of_rows = [text for text in texts if text.startswith("these neurons")]  # and one of whole layers, if one died
    assert len(of_rows) == 1 and len(texts) <= 2  # all of the network that is given back


def called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_no_code_filters_warnings_by_their_words() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and called(node) in FILTERS
        if any(word.arg == "message" for word in node.keywords) or (called(node) == "filterwarnings" and node.args[1:])
    ]
    assert not found
    tests = {path.name: path.read_text() for path in Path(__file__).parent.rglob("*.py")}
    assert not [name for name, text in tests.items() if re.search(r"ignore:[^:\"]*d[i]ed", text)]


def test_a_warning_of_dead_rows_advises_what_helps() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    with pytest.warns(DeadRowsWarning, match="fewer than the 20 neurons or filters: keep more"):
        sipp.prune(net, None, budget=3, method="magnitude", floor=0.1)
    with torch.no_grad():
        net[0].weight[3] *= 1e-6
    with pytest.warns(DeadRowsWarning, match=r"keep more, or use the default method"):
        sipp.prune(net, None, keep=0.8, method="magnitude")
