"""The folder of `prune_on_disk`: a journal of finished blocks, and the hidden states before the next block."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from sipp.errors import OptionError
from sipp.files import JOURNAL_NAME, make_folder, read_json, write_atomic, write_json
from sipp.results import BlockWeight, from_json, to_json
from sipp.storage.block_by_block.sharded_weights import companion_files, write_shard
from sipp.storage.tensors import read_tensors, tensors_to_bytes

WORK = "work"
CONFIGS = ("config.json", "generation_config.json")  # copied together with tokenizer files


@dataclass(frozen=True)
class Journal:
    """What is finished of a task."""

    task: str  # its hash
    finished: int = 0  # blocks
    weights: tuple[BlockWeight, ...] = ()
    file_of: dict[str, str] = field(default_factory=dict)  # by the name of a tensor


class BlockFolder:
    """The output folder: a journal of finished blocks, and the hidden states before the next block."""

    def __init__(self, folder: Path, task: str) -> None:
        self.folder, self.states_folder, self.task = folder, folder / WORK, task

    def begin(self) -> int:
        """The number of finished blocks; OptionError if they are of another task, or if the folder holds other files.

        If no block is finished, everything starts over, whatever the task was: nothing of it would be used again.
        """
        make_folder(self.folder)
        path = self.folder / JOURNAL_NAME
        if not path.is_file() and any(other.name != WORK for other in self.folder.iterdir()):
            raise OptionError(f"{self.folder} contains other files", fix="give a new folder", option="out")
        journal = self.journal() if path.is_file() else Journal(self.task)
        if journal.finished == 0:
            shutil.rmtree(self.states_folder, ignore_errors=True)
            make_folder(self.states_folder)
            write_json(path, to_json(Journal(self.task)))
            return 0
        if journal.task != self.task:
            raise OptionError(
                f"{self.folder} was started with other options, weights or inputs",
                fix="give the same ones to resume, or another folder",
                option="out",
            )
        return journal.finished

    def finish(self, i: int, done: Sequence[BlockWeight], tensors: Mapping[str, Tensor]) -> None:
        """Writes the file of block i, marks it as finished, and deletes the states before it."""
        file = f"block-{i:05d}.safetensors"
        write_shard(self.folder / file, tensors)
        before = self.journal()
        file_of = before.file_of | dict.fromkeys(tensors, file)
        after = replace(before, finished=i + 1, weights=(*before.weights, *done), file_of=file_of)
        write_json(self.folder / JOURNAL_NAME, to_json(after))
        shutil.rmtree(self.states_folder / str(i), ignore_errors=True)

    def journal(self) -> Journal:
        """The journal so far."""
        path = self.folder / JOURNAL_NAME
        found: Journal = from_json(Journal, read_json(path), path)
        return found

    def end(self, source: Path) -> None:
        """Copies the files that belong to the network (config, tokenizer), and deletes the states."""
        for path in companion_files(source, *CONFIGS):
            if not (self.folder / path.name).exists():
                shutil.copyfile(path, self.folder / path.name)
        shutil.rmtree(self.states_folder, ignore_errors=True)

    def write(self, i: int, side: str, j: int, state: Tensor) -> None:
        """Writes the hidden states of batch j before block i."""
        path = self._state(i, side, j)
        make_folder(path.parent)
        write_atomic(path, tensors_to_bytes({"state": state}))

    def read(self, i: int, side: str, j: int) -> Tensor:
        """Reads the hidden states of batch j before block i."""
        return read_tensors(self._state(i, side, j))[0]["state"]

    def _state(self, i: int, side: str, j: int) -> Path:
        return self.states_folder / str(i) / f"{side}-{j}.safetensors"
