"""Statements about a pruned network are about its weights: once these change, the statements are gone."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import scored_and_held_back
from torch import nn

import sipp
from sipp.errors import ModelError

X = torch.rand(200, 8, generator=torch.Generator().manual_seed(0))
SAID = ("changed after pruning", "sipp.assess")


class Net(nn.Module):
    """With a norm, and with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.note = {"made": "here"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def pruned_net(*, repair: bool = False) -> tuple[nn.Module, sipp.Pruned]:
    net = Net().eval()
    return net, sipp.prune(net, X, keep=0.5, repair=repair)


def step(pruned: sipp.Pruned) -> None:
    sipp.hold(pruned.model, pruned)
    optimizer = torch.optim.SGD(pruned.model.parameters(), lr=0.1)
    pruned.model(X).square().sum().backward()
    optimizer.step()


def watch(pruned: sipp.Pruned) -> None:
    pruned.model.train()(X)
    pruned.model.eval()


def edit(pruned: sipp.Pruned) -> None:
    pruned.model.get_parameter("last.bias").data += 1


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("change", [step, watch, edit])
def test_statements_vanish_when_weights_change(change: Any, repair: bool) -> None:
    _, pruned = pruned_net(repair=repair)
    assert pruned.up_to_date is pruned and pruned.guarantee is not None and pruned.moved is not None
    change(pruned)
    now = pruned.up_to_date
    assert now.guarantee is now.measured is now.moved is now.repair is now.bound.epsilon is None and not now.bound.met
    assert all(layer.eps is layer.bound is layer.eps_measured is layer.kappa is None for layer in now.layers)
    assert now.kept == pruned.kept and now.masks is pruned.masks
    for text in (str(pruned), pruned._repr_html_()):
        assert all(word in text for word in SAID) and "before repair" not in text


def test_files_and_pages_say_that_weights_changed(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pruned = sipp.prune(net, X, keep=0.5, holdout=X + 1)
    sipp.save_folder(pruned, tmp_path / "before")
    step(pruned)
    sipp.save(pruned, tmp_path / "net.safetensors")
    assert SAID[0] in " ".join(str(sipp.inspect(tmp_path / "net.safetensors")).split())
    sipp.save_folder(pruned, tmp_path / "after")
    records = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("before", "after")]
    assert all(records[0][key] is not None for key in ("guarantee", "measured", "moved"))
    assert all(records[1][key] is None for key in ("guarantee", "measured", "moved", "repair"))
    assert SAID[0] in records[1]["bound"]["reason"] and not records[1]["bound"]["met"]
    sipp.page(pruned, path=tmp_path / "page.html")
    assert SAID[0] in (tmp_path / "page.html").read_text()


def test_a_folder_names_all_inputs_seen_only_while_weights_are_as_pruned(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pruned = sipp.prune(net, X, keep=0.5)
    before = sipp.inspect(sipp.save_folder(pruned, tmp_path / "before"))
    step(pruned)  # on inputs that nobody named
    after = sipp.inspect(sipp.save_folder(pruned, tmp_path / "after"))
    assert before.pruned.seen.is_all and not after.pruned.seen.is_all


@pytest.mark.filterwarnings("ignore")
def test_points_that_choose_values_do_not_judge_them() -> None:
    net = nn.Sequential(nn.Linear(8, 4, bias=False))
    sound = sipp.prune(net, X, keep=0.5, method="magnitude", bound="sound", repair=True)
    on_scored = sipp.prune(net, scored_and_held_back(X)[0], keep=0.5, method="magnitude", repair=True)
    assert torch.equal(sound.model[0].weight, on_scored.model[0].weight)  # what is held back has no part in it
    assert sound.bound.coverage is not None and sound.bound.coverage.n == 50
    for method in ("sipp-blend", "magnitude"):
        judged = sipp.prune(net, X, keep=0.5, method=method, bound="sound", holdout=X[150:], repair=True)
        assert judged.bound.coverage is None or judged.bound.coverage.n == 0
        assert not judged.bound.met
    (held_back,) = scored_and_held_back(X)[1]  # it chose the blend
    chosen = sipp.prune(net, X, keep=0.5, bound="sound", holdout=held_back)
    assert not chosen.bound.met


def test_the_output_is_called_the_same_only_for_the_same_network() -> None:
    said = "the output is the same"
    net = Net().eval()
    whole = sipp.prune(net, None, keep=1.0, method="magnitude")
    assert said in str(whole)
    edit(whole)
    assert said not in str(whole) and SAID[0] in str(whole)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.first.weight.neg_()
    assert said not in str(sipp.assess(net, other, X))


def test_weights_that_are_back_are_told_and_saving_is_not_advised(tmp_path: Path) -> None:
    pruned = sipp.prune(Net().eval(), None, keep=0.5, method="magnitude")
    assert "sipp.save(" in str(pruned)
    with torch.no_grad():
        pruned.model.get_parameter("first.weight").add_(1.0)
    text = str(pruned)
    assert "first.weight is no longer zero where it was pruned" in text and "sipp.save" not in text
    with pytest.raises(ModelError, match="not zero"):
        sipp.save_folder(pruned, tmp_path / "out")
