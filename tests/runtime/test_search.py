"""The search of random networks in its short form; `python tests/runtime/search.py` is the long one."""

import pytest
from runtime.search import check

N_NETWORKS, AT_ONCE = 16, 8


@pytest.mark.parametrize("first", range(0, N_NETWORKS, AT_ONCE))
def test_random_networks_equal_torch(first):
    wrong = {seed: check(seed, most_parts=2) for seed in range(first, first + AT_ONCE)}
    assert {seed: faults for seed, faults in wrong.items() if faults} == {}
