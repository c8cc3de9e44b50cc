"""A model that computes under autocast is repaired with sums that are not."""

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.repairing.moments import Moments


class Casting(nn.Module):
    """Two layers that run in bfloat16, whatever the caller does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 20), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(torch.relu(self.first(x))).float()


@pytest.mark.parametrize("outside", [False, True])
def test_sums_are_not_cast(monkeypatch: pytest.MonkeyPatch, outside: bool) -> None:
    dtypes = set[torch.dtype]()
    add_inputs, add_rows = Moments.add_inputs, Moments.add_rows

    def inputs(self: Moments, xx_GKK: Tensor, *more: object) -> None:
        dtypes.add(xx_GKK.dtype)
        add_inputs(self, xx_GKK, *more)  # type: ignore[arg-type]

    def rows(self: Moments, patches_GKP: Tensor, gap_GRP: Tensor, *more: object) -> None:
        dtypes.update([(gap_GRP @ patches_GKP.mT).dtype, gap_GRP.dtype])
        add_rows(self, patches_GKP, gap_GRP, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Moments, "add_inputs", inputs)
    monkeypatch.setattr(Moments, "add_rows", rows)
    torch.manual_seed(0)
    net, x = Casting().eval(), torch.randn(80, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        made = sipp.prune(net, x, keep=0.5, method="magnitude", repair=True, statements=False)
    assert dtypes == {torch.float32} and made.repair is not None
