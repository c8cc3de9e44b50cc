"""`perplexity`: what the field computes, beside a definition of three lines; KL and equal choices."""

import math

import pytest
import torch
import torch.nn.functional as F
from language_models import language_model, sequences
from torch import nn

import sipp
from sipp.certificates import measures
from sipp.errors import DataError, ModelError


def talkers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    return dense, sipp.prune(dense, None, keep=0.5, method="magnitude").model


def test_it_is_the_mean_over_all_predicted_tokens_of_windows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, pruned = talkers()
    windows = torch.randint(0, 11, (7, 9), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(measures, "CHUNK", 33)  # several parts a window
    found = sipp.perplexity(pruned, windows, dense=dense, progress=False)
    with torch.no_grad():
        f, g = (net(windows)[:, :-1].double().flatten(0, 1) for net in (dense, pruned))
    truth = windows[:, 1:].flatten()
    assert found.n_tokens == 7 * 8 and found.window == 9 and found.n_windows == 7
    assert found.loss == pytest.approx(float(F.cross_entropy(g, truth)), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.dense_loss == pytest.approx(float(F.cross_entropy(f, truth)), rel=1e-6)
    kl = F.kl_div(g.log_softmax(1), f.log_softmax(1), reduction="batchmean", log_target=True)
    assert found.kl == pytest.approx(float(kl), rel=1e-5) and found.kl > 0.01
    assert found.same_token == pytest.approx(float((f.argmax(1) == g.argmax(1)).double().mean()))
    assert f"perplexity {found.perplexity:.2f}, dense {found.dense_perplexity:.2f}" in str(found)


def test_padding_is_not_predicted() -> None:
    model = language_model("Llama")
    ids = sequences(1, 12)
    alone = sipp.perplexity(model, [{"input_ids": ids[:, :8]}], progress=False)
    mask = (torch.arange(12) < 8).long()[None]
    padded = sipp.perplexity(model, [{"input_ids": ids, "attention_mask": mask}], progress=False)
    assert padded.n_tokens == alone.n_tokens == 7 and padded.loss == pytest.approx(alone.loss, rel=1e-5)


def test_logits_that_are_not_finite_make_it_infinite() -> None:
    dense, broken = talkers()
    with torch.no_grad():
        next(broken.parameters()).fill_(math.nan)
    found = sipp.perplexity(broken, torch.zeros(2, 4, dtype=torch.int64), dense=dense, progress=False)
    assert found.perplexity == math.inf and found.kl == math.inf and found.same_token == 0


def test_what_is_no_language_model_or_no_text_is_refused() -> None:
    dense, _ = talkers()
    with pytest.raises(DataError, match="not token numbers"):
        sipp.perplexity(nn.Linear(4, 4), torch.rand(3, 4), progress=False)
    with pytest.raises(ModelError, match="batch x tokens x vocabulary"):
        sipp.perplexity(nn.Sequential(dense, nn.Flatten(1)), torch.zeros(2, 4, dtype=torch.int64), progress=False)
