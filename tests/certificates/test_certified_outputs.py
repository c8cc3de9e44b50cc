"""What a certificate compares: outputs that depend on one point each, without padding. Every use is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sipp import certify, certify_accuracy
from sipp.errors import ModelError
from sipp.inputs import data_of, outputs

N = 100


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- outputs that depend on the batch


class ByTheBatch(nn.Module):
    """Outputs 1000 and a small number that depends on the mean of the batch."""

    def __init__(self, size: float, first: float = 1000.0) -> None:
        super().__init__()
        self.size, self.first = size, first

    def forward(self, x: Tensor) -> Tensor:
        small = self.size * (x.mean() > 0).to(x.dtype).expand(len(x))
        return torch.stack([torch.full_like(small, self.first), small], dim=1)


def mixed(n: int, seed: int = 0) -> Tensor:
    """Points whose mean is above 0 and whose last ones are below."""
    x = points(n, 4, seed=seed).abs()
    x[-8:] *= -0.01
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_small_part_of_the_output_that_depends_on_the_batch_is_found(dtype: torch.dtype) -> None:
    with pytest.raises(ModelError, match="depends on the others in its batch"):
        certify(ByTheBatch(2.0), ByTheBatch(0.0), [mixed(N).to(dtype)], epsilon=1e-3)


def test_dependence_on_the_batch_must_be_smaller_than_the_claimed_epsilon() -> None:
    batch = next(data_of([mixed(N).half()]).batches())
    net = nn.Linear(4, 2).half()
    assert outputs.allowed_difference(net, batch) == 8 * 2**-10
    assert outputs.allowed_difference(net, batch, 0.5) == 8 * 2**-10
    wide = next(data_of([mixed(N)]).batches())
    assert outputs.allowed_difference(nn.Linear(4, 2), wide) == 1.5e-5
    assert outputs.allowed_difference(nn.Linear(4, 2), wide, 1e-5) == 1e-5
    assert 0 < outputs.allowed_difference(nn.Linear(4, 2), wide, 0.0) < 1e-5
    with pytest.raises(ModelError, match=r"not change by more than epsilon = 1e-05"):
        certify(ByTheBatch(1.2e-2, 1000.0), ByTheBatch(0.0), [mixed(N)], epsilon=1e-5)


def test_small_outputs_that_are_differences_of_large_ones_are_fine() -> None:
    """Rounding is relative to what was added up, not to what is left of it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 1))
    for seed in range(20):
        assert certify(net, net, [points(300, 200, seed=seed)]).epsilon == 0


@pytest.mark.parametrize("sizes", [[1, N - 2, 1], [1, 1, N - 4, 1, 1]])
def test_the_first_batch_of_several_inputs_is_tried(sizes: list[int]) -> None:
    """Batches of one point, at the beginning and the end, show nothing."""
    x = torch.cat([mixed(n, seed=i) if n > 30 else -points(n, 4).abs() for i, n in enumerate(sizes)])
    with pytest.raises(ModelError, match=r"depends on the others in its batch"):
        certify(ByTheBatch(2.0), ByTheBatch(0.0), list(x.split(sizes)), epsilon=1e-3)


# ---- positions of the output


class Tokens(nn.Module):
    """Attention over positions that ignores padding; the outputs may then be reordered."""

    def __init__(self, order: str, zeroed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.order, self.zeroed = order, zeroed

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask.bool()
        hidden = self.layer(self.embed(input_ids), src_key_padding_mask=~real)
        hidden = hidden * real[..., None] if self.zeroed else hidden
        if self.order == "flipped":
            return hidden.flip(1)
        if self.order == "rolled":
            return hidden.roll(3, 1)
        if self.order == "swapped":
            return hidden[:, [1, 5, 2, 3, 4, 0, *range(6, hidden.shape[1])]] if hidden.shape[1] > 5 else hidden
        return hidden


class ZeroAtPadding(nn.Module):
    """The output of the network, with 0 wherever the input is padding."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out = self.net(input_ids, attention_mask)
        return out * attention_mask.bool()[..., None]


def sentences(to: int = 12, left: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(1, 50, (N, to), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(to) < 2 + torch.arange(N)[:, None] % 3).long()
    return {"input_ids": ids.flip(1) if left else ids, "attention_mask": mask.flip(1) if left else mask}


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("order", ["flipped", "rolled", "swapped"])
def test_padding_is_compared_if_output_positions_are_not_input_positions(order: str, zeroed: bool) -> None:
    net = Tokens(order, zeroed)
    cert = certify(net, ZeroAtPadding(net), [sentences()], epsilon=0.01)
    assert cert.verdict != "certified" and cert.violations > 0


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("zeroed", [False, True])
def test_padding_is_left_out_if_output_positions_are_input_positions(zeroed: bool, left: bool) -> None:
    net = Tokens("as it is", zeroed)
    cert = certify(net, ZeroAtPadding(net), [sentences(left=left)], epsilon=0.01)
    assert cert.verdict == "certified" and cert.violations == 0


# ---- what has no values, no names


NET = nn.Linear(4, 2)


def test_networks_without_values_are_refused() -> None:
    for call in (certify, certify_accuracy):
        for pair in ((nn.LazyLinear(2), NET), (NET, nn.LazyLinear(2))):
            with pytest.raises(ModelError, match=r"(dense|pruned): weight has no shape yet"):
                call(*pair, points(N, 4))
        with pytest.raises(ModelError, match="pruned: weight is on the meta device"):
            call(NET, nn.Linear(4, 2, device="meta"), points(N, 4))


def test_an_output_of_several_tensors_names_them() -> None:
    class Answers(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: Tensor) -> Any:
            return {"hidden": x, "logits": x} if self.kind is dict else (None, x)

    with pytest.raises(ModelError, match=r"a dict with 'hidden', 'logits' \(for example output='logits'\)"):
        certify(Answers(dict), Answers(dict), points(N, 4))
    with pytest.raises(ModelError, match=r"a tuple of 2 \(for example output=1\)"):
        certify(Answers(tuple), Answers(tuple), points(N, 4))
