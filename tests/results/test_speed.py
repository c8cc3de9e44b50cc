"""The summary of timings, on made-up ones: a median with its spread, and no number where there is none to give."""

import pytest

from sipp.results.speed import Speed, speed_headline, speed_of, speed_words


def words(sparse, dense, *, runs_dense=False):
    return speed_words(speed_of(sparse, dense), runs_dense=runs_dense)


def test_the_median_of_pairs_and_the_spread_of_their_middle():
    sparse = [1.0] * 11
    dense = [1.9, 1.7, 1.8, 1.9, 2.0, 1.9, 2.1, 1.85, 1.95, 40.0, 0.1]  # one pair in ten on either side may be anything
    assert speed_of(sparse, dense) == Speed(1.9, 1.7, 2.1)
    assert words(sparse, dense) == "1.9 x faster (1.7 to 2.1)"


def test_a_slower_machine_half_way_does_not_change_the_ratio():
    """A machine that becomes ten times slower half way through says nothing about the ratio."""
    slow = [1.0] * 10 + [10.0] * 10
    assert words(slow, [2 * one for one in slow]) == "2.0 x faster (2.0 to 2.0)"


def test_where_calls_vary_so_much_that_the_ratio_could_be_one():
    dense = [1.89, 1.02, 0.7, 3.0, 1.4, 0.9, 20.06, 1.1, 0.8, 2.0]
    assert words([1.0] * 10, dense) == "timings vary too much here to tell; is the machine busy?"
    assert speed_headline(speed_of([1.0] * 10, dense), runs_dense=False) == "not clear"


def test_no_gain_and_a_loss_are_called_so():
    assert words([1.0] * 10, [1.02, 0.99] * 5) == "as fast as torch (1.0 to 1.0)"
    assert words([1.0] * 10, [0.5, 0.4] * 5) == "2.2 x slower (2.0 to 2.5)"
    assert words([1.0] * 10, [1.89] * 10, runs_dense=True) == "run by torch: nothing gained"


@pytest.mark.parametrize(("ratio", "text"), [(1.234, "1.2"), (9.96, "10"), (20.06, "20"), (123.4, "120")])
def test_at_most_two_digits(ratio, text):
    assert words([1.0] * 10, [ratio] * 10) == f"{text} x faster ({text} to {text})"
