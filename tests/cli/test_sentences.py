"""Sentences with class numbers: all of them have one, or none."""

import pytest

from sipp.cli.language_text import _split_labels
from sipp.errors import DataError


def test_class_numbers_of_some_sentences_are_not_read_as_words() -> None:
    assert _split_labels(["good\tfilm", "bad"]) == (["good\tfilm", "bad"], None)
    texts, labels = _split_labels(["good\t1", "bad\t0"])
    assert texts == ["good", "bad"] and labels is not None and labels.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"2 of 3 sentences end in a tab.*sentence 2"):
        _split_labels(["good\t1", "odd\t-1", "bad\t0"])
