"""What stands in the record of `sipp bench FILE`: bytes, times against dense, steps. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sipp.errors import DataError
from sipp.storage.files import read_sealed
from sipp.storage.marks import BENCH_FORMAT, BENCH_KIND
from sipp.storage.run_schemas import Count, Record, checked

Milliseconds = Annotated[float, Field(gt=0)]


class BenchBytes(Record):
    """What the network takes: in its file, dense, by the entropy bound, and in memory while it runs."""

    file: Annotated[int, Field(gt=0)]
    dense: Count
    bound: float
    memory: Count
    memory_dense: Count


class BenchRun(Record):
    """A call with so many points, dense and sparse, the best of several in turns."""

    n_points: Annotated[int, Field(gt=0)]
    dense_ms: Milliseconds
    sparse_ms: Milliseconds
    off_by: float  # of the outputs, relative to the largest

    @property
    def ratio(self) -> float:
        """How many times faster."""
        return self.dense_ms / self.sparse_ms


class BenchStep(Record):
    """One step of the network with its weights, on one thread."""

    name: str
    kernel: str
    keep: float | None = None
    n_bytes: Count = 0
    n_dense_bytes: Count = 0
    dense_ms: float | None = None
    sparse_ms: float | None = None


class BenchRecord(Record):
    """What `sipp bench` says of one network."""

    kind: Literal["file bench"]
    format: int
    sipp: str
    machine: str
    n_threads: Annotated[int, Field(gt=0)]
    network: str
    pruned_hash: str
    bytes: BenchBytes
    runs: Annotated[tuple[BenchRun, ...], Field(strict=False, min_length=1)]  # the fewest points first
    steps: Annotated[tuple[BenchStep, ...], Field(strict=False)]  # of the last of the runs,
    step_points: Annotated[int, Field(gt=0)]  # which takes so many points at a time
    images: str | None = None  # how images became numbers, in words; None where there were none
    certified: str | None = None  # what is certified of the stored values, in a few words
    line: str  # smaller, faster, certified

    @property
    def smaller(self) -> float:
        """How many times smaller the file is than the dense numbers."""
        return self.bytes.dense / self.bytes.file


def read_bench(path: Path) -> BenchRecord:
    """The record in a file; DataError where it was changed, or is none."""
    values = read_sealed(path)
    if values.get("kind") != BENCH_KIND or values.get("format") != BENCH_FORMAT:
        raise DataError(f"is no record of `sipp bench` in format {BENCH_FORMAT}", where=path)
    return checked(BenchRecord, values, path)
