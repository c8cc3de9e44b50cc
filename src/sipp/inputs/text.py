"""Reads text files as sequences of token numbers for language models.

A document is a text file, or one line of a file of JSON lines (its entry "text"). Documents are kept apart: each is
tokenised by itself and cut into consecutive sequences of one length. What is left at its end is dropped, so no sequence
is padded and none holds text of two documents. For perplexity, `apart=False` follows the usual convention: all
documents are joined by empty lines, tokenised as one text and cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sipp.errors import DataError, OptionError
from sipp.files import JSON_LINES, TEXT_SUFFIXES
from sipp.results import check

LENGTH = 2048  # tokens per sequence, as usual for calibration and perplexity of language models
MOST_LENGTH = 1 << 32
FIELD = "text"  # of a JSON line
BETWEEN = "\n\n"  # separates documents that are read as one text

Files = str | PathLike[str] | Sequence[str | PathLike[str]]
Tokenizer = Callable[..., Any]  # of transformers, or any function of a text that gives {"input_ids": numbers}


@torch.inference_mode(False)
def text(
    files: Files,
    tokenizer: Tokenizer,
    *,
    length: int = LENGTH,
    n_sequences: int | None = None,
    one_a_document: bool = False,
    apart: bool = True,
    seed: int = 0,
) -> Tensor:
    """Returns the token numbers of text files as int64, one sequence of `length` tokens per row, as data for `prune`.

    `files` is a text file, a JSON-lines file (field "text"), a folder of these, or a list. `n_sequences` are drawn at
    random with the seed; without it, all are returned in order. No sequence mixes two documents. `one_a_document` takes
    one from each document, drawn with the seed: a certificate needs independent sequences, and those from the same text
    are not. `apart=False` reads everything as one text, for `perplexity`.

    Example:
        >>> import sipp, tempfile, pathlib
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "two.jsonl"
        >>> _ = file.write_text('{"text": "a text of two"}\\n{"text": "documents"}')
        >>> sipp.text(file, lambda words: {"input_ids": [ord(one) for one in words]}, length=5).shape
        torch.Size([3, 5])
    """
    check.whole("length", length, least=2, most=MOST_LENGTH)
    if n_sequences is not None:
        check.whole("n_sequences", n_sequences, least=1)
    generator = torch.Generator("cpu").manual_seed(check.seed("seed", seed))
    if not callable(tokenizer):
        raise OptionError(
            f"the tokenizer must be one of transformers, not a {type(tokenizer).__name__}",
            fix="give AutoTokenizer.from_pretrained(folder)",
        )
    found = documents(files)
    if not check.flag("apart", apart):
        found = [BETWEEN.join(found)]
    rows = [_cut(_numbers(document, tokenizer), length) for document in found]
    if check.flag("one_a_document", one_a_document):
        rows = [
            part[int(torch.randint(len(part), (1,), generator=generator, dtype=torch.int64, device="cpu"))][None]
            for part in rows
            if len(part)
        ]
    all_nT = torch.cat(rows) if rows else torch.empty(0, length, dtype=torch.int64, device="cpu")
    if len(all_nT) == 0:
        raise DataError(
            f"none of {len(found)} documents has {length} tokens",
            where=_where(files),
            fix="give a smaller length=",
            option="length",
        )
    if n_sequences is None or n_sequences >= len(all_nT):
        return all_nT
    return all_nT[torch.randperm(len(all_nT), generator=generator, dtype=torch.int64, device="cpu")[:n_sequences]]


def documents(files: Files) -> list[str]:
    """The documents of the files, in their order; those of a folder in the order of their names."""
    given = list(files) if isinstance(files, list | tuple) else [files]
    paths = [path for one in given for path in text_files(check.path("files", one, "wiki.txt"))]
    found = [document for path in paths for document in _documents_of(path) if document.strip()]
    if not found:
        raise DataError(
            "the files contain no text", where=_where(files), fix="give UTF-8 text, or JSON lines with 'text'"
        )
    return found


def text_files(path: Path) -> list[Path]:
    """The file itself, or the text files below a folder, in sorted order."""
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{path} is neither a file nor a folder", fix="give files of text, or a folder of them")
        return [path]
    found = [one for one in sorted(path.rglob("*")) if one.suffix in TEXT_SUFFIXES and one.is_file()]
    if not found:
        raise DataError(f"{path} contains no text ({', '.join(TEXT_SUFFIXES)})", fix="give files of text")
    return found


def _documents_of(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"could not be read ({error})", where=path, fix="give UTF-8 text") from error
    if path.suffix not in JSON_LINES:
        yield content
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            yield _field(line, f"{path}, line {number}")


def _field(line: str, where: str) -> str:
    """The text of a JSON line."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON ({error!s:.80})", where=where, fix="give one JSON object a line") from error
    if not isinstance(values, dict) or not isinstance(values.get(FIELD), str):
        raise DataError(f"it has no {FIELD!r}", where=where, fix='give lines such as {"text": "..."}')
    return str(values[FIELD])


def _numbers(document: str, tokenizer: Tokenizer) -> Tensor:
    """The token ids of a document, with the special tokens that the tokenizer adds."""
    try:
        found = torch.as_tensor(tokenizer(document)["input_ids"], dtype=torch.int64, device="cpu")
    except Exception as error:  # their tokenizer: anything may be raised
        raise DataError(
            f"the tokenizer failed on {len(document):,} characters ({type(error).__name__}: {error!s:.60})",
            fix="give a tokenizer of transformers, or a function of a text that gives {'input_ids': numbers}",
        ) from error
    if found.ndim != 1:
        raise DataError(
            f"the tokenizer returns ids of shape {tuple(found.shape)} for one text", fix="return one list of ids"
        )
    return found


def _cut(tokens_T: Tensor, length: int) -> Tensor:
    n = len(tokens_T) // length
    return tokens_T[: n * length].reshape(n, length)


def _where(files: Files) -> str:
    return ", ".join(map(str, files))[:200] if isinstance(files, list | tuple) else str(files)
