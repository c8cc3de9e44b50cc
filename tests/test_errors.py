"""Errors carry what, where and what to do as fields; they read as one sentence and survive the way to a process."""

import pickle

import pytest
from torch._utils import ExceptionWrapper

from sipp.errors import DataError, ModelError, OptionError, SippError
from sipp.results import check

KINDS = (ModelError, DataError, OptionError)


@pytest.mark.parametrize(
    ("where", "fix", "text"),
    [
        ("", "", "it is NaN"),
        ("batch 3", "", "batch 3: it is NaN"),
        ("", "drop it", "it is NaN; drop it"),
        ("batch 3", "drop it", "batch 3: it is NaN; drop it"),
    ],
)
def test_an_error_reads_where_what_and_fix(where: str, fix: str, text: str) -> None:
    error = DataError("it is NaN", where=where, fix=fix)
    assert str(error) == text and isinstance(error, SippError) and isinstance(error, ValueError)
    assert (error.what, error.where, error.fix, error.option) == ("it is NaN", where, fix, "")


@pytest.mark.parametrize("kind", KINDS)
def test_fields_survive_pickling(kind: type[SippError]) -> None:
    error = kind("keep=2 is too much", where="layer 1", fix="give keep=0.5", option="keep")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert (again.what, again.where, again.fix, again.option) == (error.what, "layer 1", "give keep=0.5", "keep")


def test_a_worker_of_a_loader_can_raise_it_anew() -> None:
    """torch calls the class with the text of the traceback as its only argument."""
    try:
        raise DataError("it is cut", where="a.png", fix="replace it")
    except DataError:
        wrapped = ExceptionWrapper(where="in a worker")
    with pytest.raises(DataError, match=r"a\.png: it is cut; replace it"):
        wrapped.reraise()


def test_an_outer_place_is_named_before_an_inner_one() -> None:
    error = ModelError("it is NaN", where="conv1", fix="repair it", option="exclude").inside("process 1 of 2")
    assert type(error) is ModelError and str(error) == "process 1 of 2: conv1: it is NaN; repair it"
    assert (error.where, error.fix, error.option) == ("process 1 of 2: conv1", "repair it", "exclude")
    assert ModelError("it is NaN").inside("conv1").where == "conv1"


def test_a_check_names_its_argument() -> None:
    with pytest.raises(OptionError) as caught:
        check.share("delta", 2)
    assert caught.value.option == "delta" and caught.value.fix == "give a share, for example delta=0.5"
    assert str(caught.value) == "delta=2 must lie strictly between 0 and 1; give a share, for example delta=0.5"
