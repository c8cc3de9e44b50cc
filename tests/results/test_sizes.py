"""What a file's size is called: smaller only where it is."""

import pytest

from sipp.results import words


@pytest.mark.parametrize(
    ("n_bytes", "dense_bytes", "text"),
    [
        (1000, 8123, "8.12 x smaller"),
        (1000, 1010, "1.01 x smaller"),
        (1000, 1004, "the same size"),
        (1000, 1000, "the same size"),
        (1000, 996, "the same size"),
        (1010, 1000, "1.01 x larger"),
        (2941, 1000, "2.94 x larger"),
        (300, 0, "300.00 x larger"),  # a file without a single value
    ],
)
def test_a_file_that_grew_is_larger_and_says_why(n_bytes, dense_bytes, text):
    assert words.size_headline(n_bytes, dense_bytes) == text
    why = ": in a network this small, names and records take more room than zeros save"
    assert words.size(n_bytes, dense_bytes) == text + (why if "larger" in text else "")
