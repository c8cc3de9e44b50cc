"""Text as sequences: of one length, without padding, no two documents in one."""

import json
from pathlib import Path

import pytest
import torch

import sipp
from sipp.errors import DataError
from sipp.inputs.data import data_of


def letters(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(one) for one in text]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three documents: a file of 10 letters, lines of 7 and 3."""
    (tmp_path / "a.txt").write_text("aaaaaaaaaa")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "bbbbbbb"}) + "\n\n" + json.dumps({"text": "ccc"}) + "\n")
    (tmp_path / "notes.csv").write_text("d,d,d")
    return tmp_path


def words(found: torch.Tensor) -> list[str]:
    return ["".join(map(chr, row)) for row in found.tolist()]


def test_no_sequence_holds_two_documents_and_none_is_padded(folder: Path) -> None:
    assert words(sipp.text(folder, letters, length=3)) == ["aaa", "aaa", "aaa", "bbb", "bbb", "ccc"]
    assert words(sipp.text([folder / "b.jsonl", folder / "a.txt"], letters, length=5)) == ["bbbbb", "aaaaa", "aaaaa"]


def test_as_one_text_documents_are_joined_by_an_empty_line(folder: Path) -> None:
    assert words(sipp.text(folder, letters, length=4, apart=False)) == [
        "aaaa",
        "aaaa",
        "aa\n\n",
        "bbbb",
        "bbb\n",
        "\nccc",
    ]


def test_one_sequence_a_document_and_a_number_of_them_are_drawn_with_the_seed(folder: Path) -> None:
    assert words(sipp.text(folder, letters, length=3, one_a_document=True)) == ["aaa", "bbb", "ccc"]
    numbered = folder / "n.txt"
    numbered.write_text("".join(map(chr, range(33, 123))))
    drawn = [words(sipp.text(numbered, letters, length=3, n_sequences=5, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 5


def test_which_sequence_of_a_document_is_drawn_with_the_seed(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("".join(map(chr, range(33, 123))))
    drawn = [words(sipp.text(tmp_path, letters, length=3, one_a_document=True, seed=seed)) for seed in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1] and len({found[0] for found in drawn}) > 1


@pytest.mark.parametrize(("content", "says"), [("{", "not JSON"), ('{"words": 1}', "no 'text'"), ("", "no text")])
def test_lines_that_are_none_are_refused(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(DataError, match=says):
        sipp.text(tmp_path / "x.jsonl", letters)


def test_a_text_that_is_too_short_says_so(folder: Path) -> None:
    with pytest.raises(DataError, match=r"none of \d documents has 11 tokens"):
        sipp.text(folder, letters, length=11)


def test_long_sequences_come_in_small_batches() -> None:
    """Tokens are small, but their activations are not."""
    sizes = [batch.n_points for batch in data_of(torch.zeros(40, 1024, dtype=torch.int64), batch_size=256).batches()]
    assert max(sizes) * 1024 <= 4096
