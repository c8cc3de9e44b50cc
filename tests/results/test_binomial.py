"""The binomial rules of T14 to T16 against their definitions, summed term by term."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracles import binomial as oracle
from scipy import stats

from sipp.certificates.claims import certified_epsilon, n_violations
from sipp.results import binomial, certificate as records, words

shares = st.floats(0.001, 0.999)
HASH = "0" * 64


@settings(derandomize=True, deadline=None, max_examples=50)
@given(n=st.integers(1, 120), delta=shares, beta=shares)
def test_k_allowed_equals_the_definition(n, delta, beta):
    expected = oracle.k_star(n, delta, beta)
    found = binomial.k_allowed(n, delta, beta)
    # the two may disagree only where a CDF equals beta to rounding
    if found != expected:
        near = [oracle.cdf(k, n, delta) for k in range(n + 1)]
        assert min(abs(value - beta) for value in near) < 1e-9


@settings(derandomize=True, deadline=None, max_examples=50)
@given(delta=shares, beta=shares)
def test_holdout_needed_is_the_smallest_n_with_a_claim(delta, beta):
    n = binomial.holdout_needed(delta, beta)
    assert binomial.k_allowed(n, delta, beta) is not None
    assert n == 1 or binomial.k_allowed(n - 1, delta, beta) is None
    assert abs(n - math.log(beta) / math.log1p(-delta)) < 1 + 1e-9


@pytest.mark.parametrize("beta", [1e-12, 1e-6, 0.05])
@pytest.mark.parametrize("n", [10**4, 10**7])
def test_k_allowed_with_many_points_and_little_risk(n, beta):
    """Each limit is on its side of beta by the binomial distribution itself, whose tail SciPy sums in another way."""
    for delta in (1e-4, 0.05):
        k = binomial.k_allowed(n, delta, beta)
        if k is None:
            assert n * math.log1p(-delta) > math.log(beta)
        else:
            assert stats.binom.cdf(k, n, delta) <= beta * (1 + 1e-6) < stats.binom.cdf(k + 1, n, delta)
            assert binomial.upper_limit(k, n, beta) <= delta * (1 + 1e-12) < binomial.upper_limit(k + 1, n, beta)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(n=st.integers(1, 80), share=st.floats(0, 1), beta=st.floats(0.001, 0.5))
def test_clopper_pearson_equals_the_definition(n, share, beta):
    k = round(share * n)
    assert binomial.upper_limit(k, n, beta) == pytest.approx(oracle.upper(k, n, beta), abs=1e-9)
    assert binomial.lower_limit(k, n, beta) == pytest.approx(oracle.lower(k, n, beta), abs=1e-9)


ratio_lists = st.lists(
    st.one_of(st.floats(0, 3), st.sampled_from([0.0, 0.5, math.inf, math.nan])), min_size=1, max_size=90
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(ratios=ratio_lists, delta=st.floats(0.02, 0.6))
def test_certified_epsilon_equals_the_definition(ratios, delta):
    clean = [math.inf if math.isnan(r) else r for r in ratios]
    measured = torch.tensor(ratios, dtype=torch.float64)
    found = float(certified_epsilon(measured, delta, 0.05))
    assert found == oracle.epsilon(clean, delta, 0.05)
    allowed = binomial.k_allowed(len(ratios), delta, 0.05)
    violations = int(n_violations(measured, found))
    if math.isfinite(found):
        assert violations <= allowed
    else:
        assert allowed is None or violations > allowed


def test_what_is_not_finite_violates_every_epsilon():
    ratios = torch.tensor([0.0, 0.1, math.nan, math.inf], dtype=torch.float64)
    assert [int(n_violations(ratios, e)) for e in (0.0, 0.1, 1e9, math.inf)] == [3, 2, 2, 2]


def certificate(**changes):
    base = records.Certificate(
        fixed="share", epsilon=0.12341, share=0.05, confidence=0.95, violations=38, n=1000, n_duplicates=0,
        data_hash=HASH, dense_hash=HASH, pruned_hash=HASH, dtype="float32", output=None, calibration_checked=True,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_the_verdict_follows_from_the_counts():
    assert certificate().verdict == "certified"
    assert certificate().k_allowed == 38
    assert certificate(violations=39).verdict == "not certified"
    refused = certificate(n=58, violations=0)
    assert refused.verdict == "refused: needs n >= 59"
    assert refused.k_allowed is None
    assert certificate(fixed="epsilon", violations=39).proved_share == pytest.approx(oracle.upper(39, 1000, 0.05))
    assert certificate().proved_share == 0.05  # epsilon was chosen on the points: no more than the share may be claimed
    assert refused.proved_share == 1.0


def test_sentences_say_the_numbers_and_never_more():
    assert "all but at most 5 % of inputs" in certificate().sentence
    assert "at most 12.4 % of its norm" in certificate().sentence  # 12.341 rounded up
    assert "With 95 % confidence" in certificate().sentence
    chosen = "further off; the limit was chosen to allow at most 38)"  # not luck: it was chosen on the points
    assert chosen in certificate().sentence
    assert (
        "30 of 1,000 holdout inputs were further off, 38 were allowed"
        in certificate(fixed="epsilon", violations=30).sentence
    )
    assert "at least 59 are needed" in certificate(n=58, violations=0, epsilon=math.inf).sentence
    asked = certificate(fixed="epsilon", violations=60)
    assert "Not certified at 12.341 %" in asked.sentence and "more than the 5 % asked for" in asked.sentence
    assert "not finite" in certificate(violations=39, epsilon=math.inf).sentence
    copies = certificate(n_duplicates=3).sentence
    assert (
        "3 of the inputs are copies" in copies and "38 of 1,003 holdout inputs, 1,000 of them distinct, were" in copies
    )
    few = certificate(n=20, n_duplicates=1980, violations=0, epsilon=math.inf).sentence
    assert few.startswith("No claim: 2,000 holdout inputs, 20 of them distinct, are too few")
    assert "at least 59 distinct ones are needed" in few
    assert str(certificate()).splitlines()[0] == "certified"
    sheet = str(certificate())
    assert certificate().sentence in " ".join(sheet.split()) and certificate().data_hash[:12] in sheet
    assert max(map(len, sheet.splitlines())) <= 120


@settings(derandomize=True, deadline=None)
@given(share=st.floats(0, 1e6))
def test_measured_numbers_are_rounded_up_by_little(share):
    shown = float(words.percent_up(share).removesuffix(" %")) / 100
    assert share * (1 - 1e-12) <= shown <= share * 1.0101 + 1e-300


def test_a_confidence_is_rounded_down_and_a_limit_up():
    shown = {0.95: "95", 0.9: "90", 0.99996: "99.99", 1 - 1e-9: "99.99", 2 * 0.95 - 1: "90", 0.875: "87.5"}
    assert {value: words.how_sure(value) for value in shown} == {
        value: f"{text} % sure" for value, text in shown.items()
    }
    limits = {0.12341: "0.124", 1.0: "1", 0.0: "0", 1234.1: "1,235", 2e7 + 1: "2.01e+07", 1.2301e-5: "1.24e-05"}
    assert {value: words.number_up(value) for value in limits} == limits
    assert words.number_up(None) == "" and words.number_up(math.inf) == "inf"
    assert [words.exactly(value) for value in (0.1, 1, 0.30000049)] == ["0.1", "1", "0.30000049"]


def test_accuracy_limits():
    beta = 1 - 0.95
    expected = oracle.upper(12, 200, beta / 2) - oracle.lower(5, 200, beta / 2)
    assert binomial.drop_limit(12, 5, 200, beta) == pytest.approx(expected, abs=1e-9)
