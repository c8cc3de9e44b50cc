"""The summary of timings, on made-up ones: a median with its spread, and no number where there is none to give."""

import pytest

from sipp.results import Speed


@pytest.mark.parametrize(
    ("sparse", "dense", "said"),
    [
        # one pair in ten on either side may be anything
        ([1.0] * 11, [1.9, 1.7, 1.8, 1.9, 2.0, 1.9, 2.1, 1.85, 1.95, 40.0, 0.1], "1.9 x faster (1.7 to 2.1)"),
        # a machine that becomes ten times slower half way through says nothing about the ratio
        ([1.0] * 10 + [10.0] * 10, [2.0] * 10 + [20.0] * 10, "2.0 x faster (2.0 to 2.0)"),
        ([1.0] * 10, [1.89, 1.02, 0.7, 3.0, 1.4, 0.9, 20.06, 1.1, 0.8, 2.0], "timings vary too much here to tell"),
        ([1.0] * 10, [1.02, 0.99] * 5, "as fast as torch (1.0 to 1.0)"),
        ([1.0] * 10, [0.5, 0.4] * 5, "2.2 x slower (2.0 to 2.5)"),
        ([1.0] * 10, [123.4] * 10, "120 x faster (120 to 120)"),
    ],
)
def test_what_timings_say(sparse: list[float], dense: list[float], said: str) -> None:
    assert Speed.of(sparse, dense, runs_dense=False).words.startswith(said)
    assert Speed.of(sparse, dense, runs_dense=True).words == "run by torch: nothing gained"
