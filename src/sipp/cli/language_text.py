"""Reads text for a causal language model (`--model hf:DIR --data valid.txt`): a file, JSON lines or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from sipp.cli.hugging_face_files import CONFIG, checked_config
from sipp.cli.hugging_face_models import PREFIX, folder_of, gguf_in, tokenizer_of
from sipp.errors import DataError, OptionError
from sipp.inputs.text import JSON_LINES, LENGTH, PLAIN, documents, text

CAUSAL = ("ForCausalLM", "LMHeadModel")  # class name endings of causal language models
LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len")  # keys of a config.json
N_SEQUENCES = 128  # default number for calibration, as is usual


def is_text(path: Path) -> bool:
    """Whether this is a text file or a folder with text files."""
    suffixes = (*PLAIN, *JSON_LINES)
    if path.is_dir():
        return any(file.suffix in suffixes for file in path.rglob("*"))
    return path.suffix in suffixes


def is_language_model(model: str) -> bool:
    """Whether --model names a folder with a causal language model."""
    if not model.startswith(PREFIX):
        return False
    folder = folder_of(model)
    names = _config(folder).get("architectures") or [""]
    return gguf_in(folder) is not None or str(names[0]).endswith(CAUSAL)


def length_of(model: str, asked: int | None) -> int:
    """Tokens per sequence: --length, or by default the usual number, at most what the network accepts."""
    config = _config(folder_of(model))
    limits = [config[key] for key in LONGEST if isinstance(config.get(key), int) and config[key] > 0]
    if asked is None:
        return min([LENGTH, *limits])
    if limits and asked > min(limits):
        raise OptionError(
            f"the network takes {min(limits):,} tokens at most", fix=f"give --length {min(limits)} or less"
        )
    return asked


def _config(folder: Path) -> dict[str, Any]:
    return checked_config(folder) if (folder / CONFIG).is_file() else {}


def sequences(path: Path, model: str, length: int | None, role: str, seed: int) -> tuple[Tensor, str]:
    """Token sequences from text files, and a description of them.

    A holdout has one sequence per document if there are several, because those of one text are not independent (T22).
    """
    n_tokens, n_documents = length_of(model, length), len(documents(path))
    is_one_each = role == "holdout" and n_documents > 1
    ids = text(path, tokenizer_of(model), length=n_tokens, one_a_document=is_one_each, seed=seed)
    source = f"{n_documents:,} documents" if n_documents > 1 else "one document"
    return ids, f"sequences of {n_tokens:,} tokens of {path.name} ({'one of each of ' if is_one_each else ''}{source})"


def windows(path: Path, model: str, length: int | None) -> Tensor:
    """All text as one, in windows that do not overlap, for measuring perplexity."""
    if not is_text(path):
        raise DataError(f"{path} holds no text ({', '.join((*PLAIN, *JSON_LINES))})", fix="give files of text")
    return text(path, tokenizer_of(model), length=length_of(model, length), apart=False)
