"""A sound statement about a repaired network holds for new points: those that chose the values do not judge them."""

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.inputs.data import data_of
from sipp.repairing import split_data
from sipp.scoring import ScoringTask
from sipp.verbs import prune as entry

N_TRIALS = 24
MOST_FALSE = 5  # at 5 % each, more than this comes up once in 700 times


def n_false() -> int:
    """In how many trials more of the new points than said lie outside of the bound."""
    count = 0
    for seed in range(N_TRIALS):
        generator = torch.Generator().manual_seed(seed)
        mix = torch.randn(12, 50, generator=generator)

        def draw(n: int, generator: torch.Generator = generator, mix: Tensor = mix) -> Tensor:
            noise = 0.5 * torch.randn(n, 50, generator=generator)
            return torch.randn(n, 12, generator=generator) @ mix + noise

        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(50, 6, bias=False))
        pruned = sipp.prune(net, draw(48), keep=0.5, method="magnitude", bound="sound", repair=True)
        assert pruned.bound.epsilon is not None and pruned.bound.coverage is not None
        x = draw(2000)
        with torch.no_grad():
            error = (pruned.model(x) - net(x)).norm(dim=1) / net(x).norm(dim=1)
        count += bool((error > pruned.bound.epsilon).double().mean() > pruned.bound.coverage.share)
    return count


@pytest.mark.filterwarnings("ignore")
def test_sound_statements_about_repaired_networks() -> None:
    assert n_false() <= MOST_FALSE


@pytest.mark.filterwarnings("ignore")
def test_the_simulation_sees_points_that_test_their_own_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was once: the points held back take part in the repair."""
    taken: list[Tensor] = []
    hold_back, repaired = ScoringTask.hold_back, entry.repair_network

    def take(task):  # type: ignore[no-untyped-def]
        taken[:] = [task.data]
        return hold_back(task)

    monkeypatch.setattr(ScoringTask, "hold_back", take)
    monkeypatch.setattr(
        entry,
        "repair_network",
        lambda dense, masks, _, *more, **how: repaired(dense, masks, split_data(data_of(taken[0])), *more, **how),
    )
    assert n_false() > MOST_FALSE
