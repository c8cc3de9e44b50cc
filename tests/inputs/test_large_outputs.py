"""Logits are a language model's largest tensors: computed only where needed, and compared in parts."""

import weakref

import pytest
import torch
from language_models import language_model, sequences
from torch import Tensor, nn

import sipp
from sipp.inputs import outputs as comparing
from sipp.inputs.data import data_of
from sipp.inputs.outputs import output_error
from sipp.scoring.input_scores import wanda
from sipp.scoring.task import task_of

pytestmark = pytest.mark.filterwarnings("ignore:.*the head, stays as it is")


def positions(model: nn.Module) -> list[int]:
    """At how many positions each call of the head computes logits, from now on."""
    found: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output.shape[1]))  # type: ignore
    return found


def test_scores_that_ignore_outputs_make_no_logits_but_those_of_one_position() -> None:
    model, data = language_model("Llama"), [{"input_ids": part} for part in sequences(8).split(4)]
    seen = positions(model)
    scores = wanda(task_of(model, data))
    assert seen == [1, 1]
    with_head = wanda(task_of(model, data, include=["*"]))  # which reads all positions
    assert seen[2:] == [16, 16] and with_head.keys() > scores.keys()
    assert all(torch.equal(score, with_head[name]) for name, score in scores.items())


def pair() -> tuple[nn.Module, nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    dense, other = (nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)) for _ in range(2))
    return dense, other, [torch.randint(0, 11, (n, 5)) for n in (7, 3)]


def test_outputs_are_compared_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, other, ids = pair()
    batches = list(data_of(ids).batches())
    with torch.no_grad():
        f, g = (torch.cat([net(one) for one in ids]).double() for net in (dense, other))
    wanted = float((f - g).norm() / f.norm())
    sizes: list[int] = []
    other.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    for chunk, tokens in ((1 << 22, 4096), (40, 4096), (40, 10)):
        monkeypatch.setattr(comparing, "AT_ONCE", chunk)
        monkeypatch.setattr(comparing, "TOKENS_AT_ONCE", {"cpu": tokens})
        assert output_error(dense, other, batches) == pytest.approx(wanted, rel=1e-12)
    assert sizes == [7, 3, 7, 3, 2, 2, 2, 1, 2, 1]


def test_padding_is_left_out_in_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = language_model("Llama"), sequences(3, 8)
    other = sipp.prune(model, None, keep=0.5, method="magnitude").model
    mask = (torch.arange(8) < torch.tensor([[8], [5], [3]])).long()
    batches = list(data_of([{"input_ids": ids, "attention_mask": mask}]).batches())
    whole = output_error(model, other, batches)
    monkeypatch.setattr(comparing, "AT_ONCE", 2 * 53)  # two positions
    assert output_error(model, other, batches) == pytest.approx(whole, rel=1e-9)
    assert batches[0].real_BT is not None
    full = list(data_of([{"input_ids": ids}]).batches())
    assert output_error(model, other, full) != pytest.approx(whole, rel=1e-3)


def test_two_networks_are_compared_with_one_dense_output_at_a_time() -> None:
    dense, alive, most = nn.Linear(3, 5), list[weakref.ref[torch.Tensor]](), list[int]()

    def noted(module: nn.Module, args: object, output: torch.Tensor) -> None:
        alive.append(weakref.ref(output))
        most.append(sum(one() is not None for one in alive))

    dense.register_forward_hook(noted)
    output_error(dense, nn.Linear(3, 5), list(data_of([torch.rand(4, 3) for _ in range(5)]).batches()))
    assert most == [1] * 5


@pytest.mark.parametrize("at_once", [1 << 24, 16])  # numbers: all of them, and two columns
def test_a_point_keeps_its_output_by_every_coordinate_and_by_its_norm(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "AT_ONCE", at_once)
    allowed, which = 1e-3, torch.tensor([5, 0])
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).sign()  # every norm is the root of 6
    whole[7] = 100.0

    def is_same(part: Tensor) -> bool:
        return comparing._close(whole, part, which, allowed)

    assert is_same(whole[which]) and is_same(whole[which] * (1 + allowed / 2))
    assert not is_same(whole[which.flip(0)])
    a_tenth = whole[which].clone()
    a_tenth[1, 4] += 100 * allowed / 10  # of what this coordinate comes to, and four times what the norm allows
    assert not is_same(a_tenth)
    far = whole[which].clone()
    far[0, 2] = torch.nan
    assert not is_same(far)
    whole[5, 2] = torch.nan  # in both
    assert is_same(far)
