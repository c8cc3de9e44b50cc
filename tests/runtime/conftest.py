import math

import pytest

from sipp.runtime import examples, timing


@pytest.fixture
def never_dense(monkeypatch):
    """Makes torch's dense way lose every trial, so that what is tested does not depend on a clock; also where the plan
    gives something else, which a test is to see."""
    monkeypatch.setattr(timing, "dense_time", lambda function, trials=1: math.inf)
    monkeypatch.setattr(timing, "race", lambda fast, dense: ([1e-3], [math.inf]))
    monkeypatch.setattr(timing, "TRIALS", 1)
    monkeypatch.setattr(examples, "rounding_tolerance", lambda expected: math.inf)


@pytest.fixture
def always_dense(monkeypatch):
    monkeypatch.setattr(timing, "dense_time", lambda function, trials=1: 0.0)
    monkeypatch.setattr(timing, "race", lambda fast, dense: ([1e-3], [0.0]))
