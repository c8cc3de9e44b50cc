"""Claims about language models count sequences: tokens of one text are not independent (T22).

In these texts all tokens of a sequence share one fate, which its first token decides. A claim that counts tokens as
points has eight times the points, and is false far too often: the broken version of each.
"""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from oracles.claims import Claim
from torch import Tensor, nn

import sipp
from sipp.certificates.claims import AccuracyClaim, certified_epsilon
from sipp.certificates.measures import Outcomes, mean_at, outcome_counts
from sipp.results.binomial import share_limit
from sipp.results.certificate import AnyCertificate
from sipp.results.jsonio import from_json, to_json

N_TOKENS, LENGTH, N, N_TRIALS, BETA = 64, 8, 60, 100, 0.1
FIRST = torch.arange(N_TOKENS)


class Talker(nn.Module):
    """Repeats its token; `changed` says at how many of a sequence's positions it does not, by its first token."""

    def __init__(self, changed: Tensor) -> None:
        super().__init__()
        self.changed: Tensor
        self.register_buffer("changed", changed)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor) -> Tensor:
        wrong = torch.arange(ids.shape[1]) < self.changed[ids[:, :1]]
        return self.weight * nn.functional.one_hot((ids + wrong) % N_TOKENS, N_TOKENS).float()


class Doubting(nn.Module):
    """Says its token with a certainty that a sequence's first token takes a part of: one KL at all of its positions."""

    def __init__(self, doubt: Tensor) -> None:
        super().__init__()
        self.doubt: Tensor
        self.register_buffer("doubt", doubt)
        self.weight = nn.Parameter(torch.full((1,), 6.0))

    def forward(self, ids: Tensor) -> Tensor:
        certain = self.weight * (1 - self.doubt[ids[:, :1, None]])
        return certain * nn.functional.one_hot(ids, N_TOKENS).float()


def texts(trial: int) -> Tensor:
    return torch.randint(0, N_TOKENS, (N, LENGTH), generator=torch.Generator().manual_seed(trial))


UNCHANGED = Talker(torch.zeros(N_TOKENS, dtype=torch.int64))


def false_drops(counts_tokens: bool) -> list[bool]:
    """One sequence in eight changes, in all of its tokens: a smaller limit is a false claim."""
    pruned, found = Talker(torch.where(FIRST < 8, LENGTH, 0)), []
    for trial in range(N_TRIALS):
        cert = sipp.certify_accuracy(UNCHANGED, pruned, texts(trial), confidence=1 - BETA, progress=False)
        assert cert.measure == "next-token" and cert.n == N
        if counts_tokens:
            cert = replace(cert, n=N * LENGTH, n_differ=cert.n_differ * LENGTH, measure="class")
        found.append(cert.drop_upper < 1 / 8)
    return found


def false_epsilons(measure: str, dense: nn.Module, pruned: nn.Module, of_first: Tensor) -> Claim:
    """`of_first` is the error of a sequence by its first token; P(the largest) = 1/8 > share, so less is false."""
    share, least = 0.12, float(of_first.max()) - 1e-6
    assert int((of_first > least).sum()) == N_TOKENS // 8

    def simulate(counts_tokens: bool) -> list[bool]:
        found = []
        for trial in range(N_TRIALS):
            ids = texts(trial)
            if counts_tokens:
                errors = of_first[ids[:, 0]].repeat_interleave(LENGTH)
                found.append(float(certified_epsilon(errors, share, BETA, n=N * LENGTH)) < least)
            else:
                how = {"measure": measure, "share": share, "confidence": 1 - BETA, "progress": False}
                found.append(sipp.certify(dense, pruned, ids, **how).epsilon < least)
        return found

    return Claim(simulate, False, {"tokens": True}, BETA)


def mean_kl(dense: nn.Module, pruned: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        log_f, log_g = (net(ids).double().log_softmax(2) for net in (dense, pruned))
    return (log_f.exp() * (log_f - log_g)).sum(2).mean(1)


CHANGING = Talker(FIRST % LENGTH)
SURE, DOUBTING = Doubting(torch.zeros(N_TOKENS)), Doubting((FIRST % LENGTH).float() / LENGTH)
CLAIMS = {
    "drop": Claim(false_drops, False, {"tokens": True}, BETA),
    "next-token": false_epsilons("next-token", UNCHANGED, CHANGING, (FIRST % LENGTH).double() / LENGTH),
    "kl": false_epsilons("kl", SURE, DOUBTING, mean_kl(SURE, DOUBTING, FIRST[:, None].repeat(1, LENGTH))),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_are_about_sequences(name: str) -> None:
    CLAIMS[name].check()


def test_a_tolerance_tests_sequences_as_the_certificate_states_them() -> None:
    """It takes sums of shares for what they are (T22)."""
    pruned = Talker(torch.where(FIRST < 8, 3, 0))
    stated = AccuracyClaim(0.9, 1 - BETA).test(UNCHANGED, pruned, texts(0), None, None)
    assert stated.drop_upper == share_limit(stated.n_differ, N, BETA / math.e)


def test_shares_of_positions_are_added_without_rounding() -> None:
    """Thirds and sevenths are not in float64: what is lost and gained came out as more than what differs."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(300):
        n, length = 2 + trial % 50, (3, 6, 7, 11)[trial % 4]
        kinds = torch.randint(0, 3, (n, length), generator=generator)  # the same, lost, gained
        shares = [mean_at(one, torch.ones_like(one)) for one in (kinds == 1, kinds == 2, kinds > 0)]
        found = outcome_counts(Outcomes(*shares, *[torch.ones(n)] * 3), [bytes([i]) for i in range(n)])
        lost, gained, differ = (Fraction(int(one.sum()), length) for one in (kinds == 1, kinds == 2, kinds > 0))
        assert found == (math.ceil(lost), math.floor(gained), math.ceil(differ), n)


def test_a_sequence_counts_with_the_share_of_its_positions() -> None:
    """Shares are summed and rounded up; sums of shares cost a factor e of the risk (Bentkus)."""
    ids = texts(0)
    cert = sipp.certify_accuracy(UNCHANGED, CHANGING, ids, progress=False)
    assert cert.n_differ == math.ceil(float((ids[:, 0] % LENGTH).double().sum() / LENGTH)) < N
    limit = share_limit(cert.n_differ, N, 0.05 / math.e)
    assert math.isclose(cert.drop_upper, limit) and limit > 1.01 * share_limit(cert.n_differ, N, 0.05)
    assert "changes the predicted next token at no more than" in cert.sentence


def test_kl_is_the_mean_of_a_sequence_and_padding_is_none_of_it() -> None:
    torch.manual_seed(0)
    dense, pruned = (nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11)) for _ in range(2))
    ids = torch.randint(0, 11, (80, 6))
    cert = sipp.certify(dense, pruned, ids, measure="kl", progress=False)
    kl = mean_kl(dense, pruned, ids)
    assert cert.epsilon == float(certified_epsilon(kl, 0.05, 0.05, n=cert.n)) and cert.measure == "kl"
    assert "nats of the dense network's (KL" in cert.sentence and from_json(AnyCertificate, to_json(cert), "it") == cert
    assert sipp.certify(dense, pruned, ids, progress=False).measure == "output"
