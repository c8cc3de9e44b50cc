"""Models that are odd: layers without weights are left alone, and what cannot be pruned is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.pruned import Method

POINTS = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.zeros(20, dtype=torch.int64)


class PartlyEmpty(nn.Module):
    """One layer with weights, and two that have none: no rows, no fan-in."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.no_rows, self.no_inputs = nn.Linear(5, 3), nn.Linear(5, 0), nn.Linear(0, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.full(x), self.no_inputs(self.no_rows(x))], 1)


@pytest.mark.filterwarnings("ignore:.*rows died")
@pytest.mark.parametrize("method", ["sipp-det", "sipp-rand", "sipp-hybrid", "sipp-simple", "wt", "snip", "random"])
def test_layers_without_weights_are_left_alone(method: Method) -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = PartlyEmpty()
    pruned = sipp.prune(model, [(POINTS, LABELS)], keep=0.4, method=method)
    assert set(pruned.masks) == {"full.weight"} and int(pruned.masks["full.weight"].sum()) == 6
    assert list(pruned.model.state_dict()) == list(model.state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_no_network_that_can_be_seen_is_refused() -> None:
    plain = nn.Sequential(nn.Linear(5, 3))
    with torch.device("meta"):
        shapes_only = nn.Sequential(nn.Linear(5, 3))
    for model, words in (
        (torch.jit.script(plain), "TorchScript"),
        (torch.jit.trace(plain, POINTS), "TorchScript"),
        (shapes_only, r"0\.weight is on the meta device"),
        (PartlyEmpty, "not an nn.Module"),
        (5, "not an nn.Module"),
    ):
        for prune in (sipp.sensitivity, lambda m, d: sipp.prune(m, d, keep=0.5)):
            with pytest.raises(ModelError, match=words):
                prune(model, [POINTS])


def test_snip_says_which_labels_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    with pytest.raises(DataError, match=r"batch 1: snip's loss .* labels \(torch\.int64 \(20,\)\)"):
        sipp.prune(model, [(POINTS, LABELS), (POINTS, LABELS + 9)], keep=0.5, method="snip")
