"""SynFlow: the weights that its definition leaves, whatever the budget; the model left alone, no layer emptied."""

import copy

import pytest
import torch
from oracles import scores as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.scoring import synflow as file
from sipp.scoring.synflow import synflow
from sipp.scoring.task import task_of


def linear() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def conv() -> nn.Module:
    torch.manual_seed(2)
    layers = (
        nn.Conv2d(2, 4, 2, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model = nn.Sequential(*layers)
    model[1].running_var.fill_(3.0)
    return model


NETS = {
    "linear": (linear, ["0.weight", "2.weight", "4.weight"], (3,)),
    "conv": (conv, ["0.weight", "5.weight"], (2, 3, 3)),
}


@pytest.mark.parametrize("n_steps", [1, 7])
@pytest.mark.parametrize("kind", NETS)
def test_every_budget_leaves_what_the_definition_leaves(
    kind: str, n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "STEPS", n_steps)
    make, names, shape = NETS[kind]
    model = make()
    scores = synflow(task_of(model, torch.randn(5, *shape)))
    assert list(scores) == names
    flat = torch.cat([score.flatten() for score in scores.values()])
    assert len(flat.unique()) == len(flat)
    for budget in (1, 2, 5, 9, 17, 25):
        kept = flat.argsort(descending=True)[:budget].sort().values.tolist()
        assert kept == oracle.synflow(model, names, shape, n_steps, budget)


def test_the_data_is_looked_at_for_its_shape_alone_and_the_model_is_left_alone() -> None:
    model = conv().train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(6, 2, 3, 3)
    first, other = synflow(task_of(model, x)), synflow(task_of(model, [(-7 * x[:2], None)]))
    assert all(torch.equal(first[name], score) for name, score in other.items())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training and not model[0].weight.requires_grad and model[5].weight.grad is None
    batch_stats = synflow(task_of(model, x, norm_stats="batch"))
    assert all(torch.equal(first[name], score) for name, score in batch_stats.items())


def test_weights_without_flow_go_first() -> None:
    """Zeros, and weights into neurons that nothing leaves."""
    model = linear()
    with torch.no_grad():
        model[2].weight[:, 1:3] = 0.0
    scores = synflow(task_of(model, torch.ones(1, 3)))
    still = torch.cat([scores["0.weight"][1:3].flatten(), scores["2.weight"][:, 1:3].flatten()])
    flat = torch.cat([score.flatten() for score in scores.values()]).sort().values
    assert torch.equal(still.sort().values, flat[: len(still)])


def test_no_layer_is_emptied_where_one_step_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its point: flow that is taken anew finds its way back to the layer that all paths need."""
    torch.manual_seed(0)
    layers = (nn.Linear(6, 90, bias=False), nn.ReLU(), nn.Linear(90, 90, bias=False), nn.Linear(90, 4, bias=False))
    model, x = nn.Sequential(*layers), torch.ones(2, 6)
    assert all(layer.kept for layer in sipp.prune(model, x, keep=0.001, method="synflow").layers)
    monkeypatch.setattr(file, "STEPS", 1)
    assert not all(layer.kept for layer in sipp.prune(model, x, keep=0.001, method="synflow").layers)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(9, 3), nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.lstm(self.embed(tokens))[0]
        return hidden, {"tags": self.out(hidden[:, -1])}


def test_tokens_recurrent_layers_and_nested_outputs() -> None:
    torch.manual_seed(0)
    scores = synflow(task_of(Tagger(), torch.arange(8).view(2, 4)))
    assert set(scores) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "out.weight"}
    assert all(len(score.unique()) > 1 for score in scores.values())


def test_what_has_no_flow_is_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ModelError, match="synflow cannot rank the weights"):
        synflow(task_of(nn.Sequential(nn.Linear(3, 3), nn.Threshold(1e9, 0.0)), x))
    huge = linear()
    with torch.no_grad():
        huge[0].weight.fill_(float("inf"))
    with pytest.raises((ModelError, DataError)):
        synflow(task_of(huge, x))
