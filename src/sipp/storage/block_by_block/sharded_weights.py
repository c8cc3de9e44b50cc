"""Reads and writes weights in one safetensors file, or in several with an index, as Hugging Face stores them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sipp.errors import DataError
from sipp.files import file_hash, read_file, write_atomic
from sipp.storage.tensors import tensors_to_bytes

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
BELONGING = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "bpe.codes", "*.model",
    "*.spm", "chat_template*", "preprocessor_config.json", "processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip


@dataclass(frozen=True)
class ShardedWeights:
    """Which file of a folder holds which tensor."""

    folder: Path
    file_of: dict[str, str]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads these tensors, on the CPU; opens each file once and reads nothing else of it."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.file_of[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for file, wanted in by_file.items():
            with safe_open(self.folder / file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name).clone() for name in wanted}
        return tensors

    def hashes(self) -> dict[str, str]:
        """The SHA-256 of each file."""
        return {file: file_hash(self.folder / file) for file in sorted({*self.file_of.values()})}


def sharded_weights(folder: Path) -> ShardedWeights:
    """The weights in a folder; DataError if there are none, or if the index names a missing file."""
    if (folder / ONE_FILE).is_file() or not (folder / INDEX).is_file():
        return ShardedWeights(folder, dict.fromkeys(names_in(folder / ONE_FILE), ONE_FILE))
    path = folder / INDEX
    try:
        file_of = json.loads(read_file(path))["weight_map"]
        missing = sorted(file for file in set(file_of.values()) if not (folder / file).is_file())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"is not an index of weights ({type(error).__name__}: {error})", where=path) from error
    if missing:
        raise DataError(f"lists {missing[0]}, which does not exist", where=path)
    return ShardedWeights(folder, file_of)


def names_in(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file; DataError if it is none."""
    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"no weights could be read ({error})", where=path, fix=f"give a folder with {ONE_FILE} or {INDEX}"
        ) from error


def companion_files(folder: Path, *more: str) -> list[Path]:
    """The other files of a model's folder: tokenizer, chat template, licence."""
    paths = {path for pattern in (*BELONGING, *more) for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_file())


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors as one file of a folder, atomically."""
    write_atomic(path, tensors_to_bytes(tensors, {"format": "pt"}))


def write_index(folder: Path, file_of: Mapping[str, str], n_bytes: int) -> None:
    """Writes the index, which completes the folder."""
    values = {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(file_of.items()))}
    write_atomic(folder / INDEX, json.dumps(values, indent=1).encode())
