"""Several processes: the masks of one, errors in all at once, nothing published by half of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run_script

from sipp_lab.processes import from_leader

PROCESS_LOOP = Path(__file__).parent / "process_loop.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = run_script(PROCESS_LOOP, tmp_path_factory.mktemp("processes"))
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_masks_are_bitwise_those_of_one_process(found: dict[str, Any]) -> None:
    assert found["n_masks"] == 8 and found["same masks"] and found["same start"]


def test_several_processes_make_the_steps_of_one(found: dict[str, Any]) -> None:
    assert found["same training"]
    assert found["made"] == [{"value": 3}] * 2 and found["made again"] == [{"value": 0}] * 2


def test_dropout_is_another_one_in_each_process(found: dict[str, Any]) -> None:
    n_all, n_of_one = found["n_seeds"]
    assert n_all == 2 * n_of_one > 0


def test_processes_agree_on_every_cut_of_a_gradual_run(found: dict[str, Any]) -> None:
    assert found["gradual"] == [{"value": 3}] * 2 and found["gradual keeps"] == [1.0, 0.5, 0.5]


def test_an_error_of_the_leader_stops_all_with_the_same_words(found: dict[str, Any]) -> None:
    first, second = (one["error"] for one in found["nan"])
    assert first == second and first == "DataError: batch 3: it is NaN"


def test_what_the_dead_left_is_gone_on_with_to_the_same_bits(found: dict[str, Any]) -> None:
    assert found["left by the dead"] == 1 and found["resumed the same"]


def test_a_dead_process_ends_the_others_and_publishes_nothing(found: dict[str, Any]) -> None:
    survivor, dead = found["died"]
    assert dead == {"status": 9} and "error" in survivor and found["published"] == 0


def test_a_single_process_needs_no_communication() -> None:
    assert from_leader(lambda: 3) == 3
