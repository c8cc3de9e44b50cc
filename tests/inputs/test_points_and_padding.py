"""How scores count points and leave out padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draws import randn
from torch import Tensor, nn

import sipp
from sipp.errors import DataError
from sipp.inputs.data import Batch, Data
from sipp.scoring import sensitivities
from sipp.scoring.task import Sensitivities, task_of

LENGTHS = torch.tensor([5, 2, 7, 1])
WIDTH = 8


def padded_to(n_steps: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same sequences with padding that is not zero, and which positions are real."""
    real_BT = torch.arange(n_steps) < LENGTHS[:, None]
    x = 5 * randn(len(LENGTHS), n_steps, WIDTH, seed=n_steps)
    x[real_BT] = torch.cat([randn(int(n), WIDTH, seed=seed + i) for i, n in enumerate(LENGTHS)])
    return x, real_BT


def scores_of(model: nn.Module, batch: Batch, reduce: str, monkeypatch: pytest.MonkeyPatch) -> Sensitivities:
    """The scores of one batch as it is given, with what it says of padding."""
    with monkeypatch.context() as patched:
        patched.setattr(Data, "batches", lambda *args: iter([batch]))
        return sensitivities.measure_sensitivities(task_of(model, [None]), reduce=reduce)


def same(a: Sensitivities, b: Sensitivities) -> bool:
    """Whether scores agree up to rounding, and so does what T4 counts."""
    return a.n_outputs == b.n_outputs and all(
        torch.allclose(x.sensitivity_FK, y.sensitivity_FK, rtol=1e-4, atol=1e-5) for x, y in zip(a.layers, b.layers)
    )


class Reader(nn.Module):
    """Layers over padded sequences, called by `call(layer, x, real_BT)`, behind a layer of their own."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.call = nn.Linear(WIDTH, WIDTH), layer, call

    def forward(self, x: Tensor, real_BT: Tensor) -> Tensor:
        return self.call(self.layer, self.first(x).tanh(), real_BT)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)


READERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Reader(nn.LSTM(WIDTH, 4, 2, batch_first=True), lambda m, x, real: m(x)[0]),
    "time-major lstm": lambda: Reader(nn.LSTM(WIDTH, 4), lambda m, x, real: m(x.transpose(0, 1))[0].transpose(0, 1)),
    "encoder": lambda: Reader(encoder(), lambda m, x, real: m(x, src_key_padding_mask=~real)),
}


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("kind", READERS)
def test_padding_changes_no_score(kind: str, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = READERS[kind]()
    found = {}
    for n_steps in (9, 30):
        x, real_BT = padded_to(n_steps)
        for given in (real_BT, None):
            batch = Batch(0, "batch 0", (x, real_BT), {}, None, len(x), given)
            found[n_steps, given is None] = scores_of(model, batch, reduce, monkeypatch)
    assert same(found[9, False], found[30, False])
    assert not same(found[9, True], found[30, True])  # padding that is not named as such counts


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_keys_and_values_that_attention_hides_are_no_patches(batch_first: bool, reduce: str) -> None:
    """Not named as padding by the batch: the mask of the call is enough for keys and values, queries stay."""

    class Attends(nn.Module):
        def __init__(self, keeps_padding: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.m = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
            self.keeps_padding = keeps_padding

        def forward(self, x: Tensor, is_hidden: Tensor) -> Tensor:
            query = x[:, :4]
            if not self.keeps_padding:
                x, is_hidden = x[:, :4], is_hidden[:, :4]
            tensors = (query, x, x) if batch_first else (t.transpose(0, 1) for t in (query, x, x))
            out = self.m(*tensors, key_padding_mask=is_hidden)[0]
            return out if batch_first else out.transpose(0, 1)

    x = randn(3, 6, WIDTH)
    is_hidden = torch.arange(6).expand(3, 6) >= 4
    kept = sipp.sensitivity(Attends(True), [((x, is_hidden), None)], reduce=reduce)
    cut = sipp.sensitivity(Attends(False), [((x, is_hidden), None)], reduce=reduce)
    assert all(torch.allclose(kept[name], cut[name], rtol=1e-4, atol=1e-6) for name in cut)


def test_padding_is_left_out_also_where_attention_hides_other_positions() -> None:
    """Its own mask hides the first position; the batch names the last one as padding."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            is_hidden = (torch.arange(x.shape[1]) == 0).expand(x.shape[:2])
            return self.m(x, x, x, key_padding_mask=is_hidden, need_weights=False)[0]

    torch.manual_seed(0)
    model, x = Attends(), randn(6, 5, WIDTH)
    real = (torch.arange(5) < 4).expand(6, 5).long()
    other = x.clone()
    other[:, -1] = torch.eye(WIDTH)[0]  # one value alone has a ratio of 1
    scores = [sipp.sensitivity(model, [{"x": one, "attention_mask": real}])["m.in_proj_weight"] for one in (x, other)]
    assert torch.equal(*scores)


# --- Points ----------------------------------------------------------------------------------------------------------


class First(nn.Module):
    """A module whose first output counts."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def test_time_steps_are_no_points() -> None:
    """An output that depends on the inputs before it stops; where all attend to all, nothing is promised."""
    torch.manual_seed(0)
    for model in (First(nn.LSTM(8, 5), lambda m, x: m(x)[0]), First(nn.GRU(8, 5, 2), lambda m, x: m(x)[0])):
        with pytest.raises(DataError, match="time, not the batch"):
            sipp.prune(model, [randn(60, 4, 8)], keep=0.5, method="sipp-hybrid")
    for model in (First(nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0]), nn.TransformerEncoderLayer(8, 2, 16)):
        pruned = sipp.prune(model, [randn(60, 4, 8)], keep=0.5, method="sipp-hybrid")
        assert "dimension 0 is time, not the batch" in pruned.guarantee.reason


FOLDED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "frames in the batch": lambda m, x: m(x.unflatten(1, (2, 3)).flatten(0, 1))[0].unflatten(0, (len(x), 2)),
    "some points at a time": lambda m, x: torch.cat([m(part)[0] for part in x.split(2)]),
    "one sequence at a time": lambda m, x: torch.stack([m(one)[0] for one in x]),
}


@pytest.mark.parametrize("call", FOLDED.values(), ids=FOLDED)
def test_sequences_of_other_batches_inside_the_model_are_fine(call: Callable[[nn.Module, Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = First(nn.LSTM(8, 5, batch_first=True), call)
    assert sipp.sensitivity(model, [randn(4, 6, 8)])


def test_a_call_without_patches_adds_nothing() -> None:
    """An expert that gets no token in one batch is scored by the others."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            goes_to_a = x[:, 0] > 0
            out = x.new_zeros(len(x), 3)
            out[goes_to_a], out[~goes_to_a] = self.a(x[goes_to_a]), self.b(x[~goes_to_a])
            return out

    torch.manual_seed(0)
    model, x = Experts(), randn(6, 8)
    x[:, 0] = x[:, 0].abs()
    scores = sipp.sensitivity(model, [x, -x])
    assert torch.equal(scores["a.weight"], sipp.sensitivity(model.a, [x])["weight"])
    assert torch.equal(scores["b.weight"], sipp.sensitivity(model.b, [-x])["weight"])


# --- Points that are not what dimension 0 says ------------------------------------------------------------------------


def test_one_image_is_not_as_many_points_as_it_has_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    with pytest.raises(DataError, match=r"one image without a batch dimension.*torch\.stack"):
        sipp.prune(model, [torch.rand(3, 8, 8) for _ in range(5)], keep=0.5)
    assert sipp.prune(model, [torch.rand(5, 3, 8, 8)], keep=0.5, method="magnitude").guarantee.n == 5


# --- From the data to the certificate ---------------------------------------------------------------------------------


def sentences(n: int, to: int, seed: int) -> dict[str, Tensor]:
    """Sentences of 3 to 29 words with labels, the same whatever they are padded to."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = torch.zeros(2, n, to, dtype=torch.int64)
    for i, length in enumerate(torch.randint(3, 30, (n,), generator=generator).tolist()):
        ids[i, :length] = torch.randint(1, 50, (length,), generator=generator)
        mask[i, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 3, (n,), generator=generator)}


@pytest.mark.filterwarnings("ignore")  # rows die at so small a size
def test_the_same_text_padded_to_32_and_to_128_gives_the_same_masks_and_certificate() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=128, num_labels=3, **sizes)
    model = transformers.BertForSequenceClassification(config)
    found = []
    for to in (32, 128):
        calibration, holdout = [sentences(40, to, 0), sentences(40, to, 1)], [sentences(60, to, 2)]
        pruned = sipp.prune(model, calibration, keep=0.5)
        by_loss = sipp.prune(
            model, calibration, keep=0.5, method="snip", loss=lambda out, labels: F.cross_entropy(out.logits, labels)
        )
        output = sipp.certify(model, pruned.model, holdout, output="logits", calibration=calibration)
        accuracy = sipp.certify_accuracy(model, pruned.model, holdout, output="logits")
        assert accuracy.mode == "labels" and pruned.guarantee.n == 60 and pruned.choice.n_inputs == 20
        found.append((pruned, by_loss, output, accuracy))
    for one, other in zip(found[0][:2], found[1][:2]):
        assert all(torch.equal(one.masks[name], other.masks[name]) for name in one.masks)
    short, long = found[0][2], found[1][2]
    assert short.data_hash == long.data_hash and short.epsilon == pytest.approx(long.epsilon, rel=1e-5)
    assert (found[0][3].n_lost, found[0][3].n_gained) == (found[1][3].n_lost, found[1][3].n_gained)
