"""Reads text for a network of Hugging Face (`--model hf:DIR --data valid.txt`).

A causal language model gets sequences of tokens from a file, JSON lines or a folder; any other network gets sentences,
one per line of a file.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import Tensor

import sipp
from sipp.cli.hugging_face import PREFIX, config_of, folder_of, tokenizer_of
from sipp.errors import DataError, OptionError, SippError
from sipp.files import TEXT_SUFFIXES

LENGTH: int = inspect.signature(sipp.text).parameters["length"].default
CAUSAL = ("ForCausalLM", "LMHeadModel")  # class name endings of causal language models
LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len")  # keys of a config.json
N_SEQUENCES = 128  # default number for calibration, as is usual
MOST_TOKENS = 512  # per sentence
LABEL_SEPARATOR = "\t"


def is_text(path: Path) -> bool:
    """Whether this is a text file or a folder with text files."""
    if path.is_dir():
        return any(file.suffix in TEXT_SUFFIXES for file in path.rglob("*"))
    return path.suffix in TEXT_SUFFIXES


def is_language_model(model: str) -> bool:
    """Whether --model names a folder with a causal language model."""
    if not model.startswith(PREFIX):
        return False
    names = config_of(model).get("architectures") or [""]
    return str(names[0]).endswith(CAUSAL)


def length_of(model: str, asked: int | None) -> int:
    """Tokens per sequence: --length, or by default the usual number, at most what the network accepts."""
    config = config_of(model)
    limits = [config[key] for key in LONGEST if isinstance(config.get(key), int) and config[key] > 0]
    if asked is None:
        return min([LENGTH, *limits])
    if limits and asked > min(limits):
        raise OptionError(
            f"the network accepts at most {min(limits):,} tokens", fix=f"give --length {min(limits)} or less"
        )
    return asked


def sequences(path: Path, model: str, length: int | None, is_holdout: bool, seed: int) -> tuple[Tensor, str]:
    """Token sequences from text files, and a description of them.

    A holdout has one sequence per document if there are several, because those of one text are not independent (T22).
    """
    n_tokens, tokenizer = length_of(model, length), tokenizer_of(model)
    if is_holdout:
        ids = sipp.text(path, tokenizer, length=n_tokens, one_a_document=True, seed=seed)
        if len(ids) > 1:
            return ids, f"sequences of {n_tokens:,} tokens of {path.name}, one of each document"
    return sipp.text(path, tokenizer, length=n_tokens), f"sequences of {n_tokens:,} tokens of {path.name}"


def windows(path: Path, model: str, length: int | None, n_windows: int | None) -> tuple[Tensor, str]:
    """The first windows (or all) of all text as one, which do not overlap, to measure perplexity; and their words."""
    all_nT = sipp.text(path, tokenizer_of(model), length=length_of(model, length), apart=False)
    read_nT = all_nT[:n_windows]
    first = f"the first {len(read_nT):,} of {len(all_nT):,}" if len(read_nT) < len(all_nT) else f"{len(all_nT):,}"
    words = f"{first} windows of {all_nT.shape[1]:,} tokens of {path.name}, read as one text"
    return read_nT, f"{words}, tokenizer of {model.removeprefix(PREFIX)}"


def sentences(path: Path, model: str) -> dict[str, Tensor]:
    """The lines of a text file as tokens, for a network that is no causal language model; and labels, if every line
    ends in a tab and a class number.
    """
    if not model.startswith(PREFIX):
        raise DataError(
            f"{path.name} contains text, and {model or 'the network'} has no tokenizer", fix="give --model hf:DIR"
        )
    folder = folder_of(model)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        texts, labels = _split_labels([line for line in lines if line])
        if not texts:
            raise DataError(f"{path} contains no sentences", fix="give one sentence per line")
        tokenizer, longest = tokenizer_of(model), min(length_of(model, None), MOST_TOKENS)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
    except SippError:
        raise
    except Exception as error:  # not text, or a broken tokenizer
        raise DataError(
            f"{path} could not be read with the tokenizer of {folder} ({type(error).__name__})",
            fix="give UTF-8 text, one sentence per line, and a folder that contains its tokenizer",
        ) from error
    return dict(tokens) | ({} if labels is None else {"labels": labels})


def _split_labels(lines: list[str]) -> tuple[list[str], Tensor | None]:
    """The sentences and, if every line ends in a tab and a number, their labels."""
    parts = [line.rpartition(LABEL_SEPARATOR) for line in lines]
    fits = [bool(text) and label.isascii() and label.isdigit() and len(label) < 7 for text, _, label in parts]
    if not any(fits):
        return lines, None
    if not all(fits):  # otherwise numbers would be read as words
        raise DataError(
            f"only {sum(fits)} of {len(fits)} sentences end in a tab and a class number; the first without is "
            f"sentence {fits.index(False) + 1}",
            fix="give all of them a class number (0, 1, ...), or none",
        )
    labels = torch.tensor([int(label) for _, _, label in parts], dtype=torch.int64, device="cpu")
    return [text for text, _, _ in parts], labels
