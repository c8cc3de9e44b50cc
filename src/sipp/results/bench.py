"""What `sipp bench` measured of one network: bytes and times, as it is written. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sipp.results.display import size_headline, why_larger
from sipp.results.schemas import Count, Positive, Record
from sipp.results.speed import Speed, speed_headline, speed_words

Milliseconds = Annotated[float, Field(gt=0)]
Times = Annotated[float, Field(gt=0)]  # as much

BENCH_KIND: Literal["file bench"] = "file bench"
BENCH_FORMAT: Literal[2] = 2


class BenchBytes(Record):
    """Bytes of the network: in its file, dense, by the entropy bound, and in memory while it runs."""

    file: Positive
    dense: Count
    bound: float
    memory: Count
    memory_dense: Count


class BenchRun(Record):
    """Timings of dense and sparse calls with `n_points` points: medians over alternating calls."""

    n_points: Positive
    dense_ms: Milliseconds
    sparse_ms: Milliseconds
    ratio: Times  # how many times faster, and where the middle of the pairs lies
    low: Times
    high: Times
    runs_dense: bool  # torch runs all of it on both sides
    off_by: float  # of the outputs, relative to the largest

    @property
    def speed(self) -> Speed:
        """How many times faster, with its spread."""
        return Speed(self.ratio, self.low, self.high)

    @property
    def headline(self) -> str:
        """The speed in three words."""
        return speed_headline(self.speed, runs_dense=self.runs_dense)

    @property
    def words(self) -> str:
        """The speed with its spread, or why there is none."""
        return speed_words(self.speed, runs_dense=self.runs_dense)


class BenchStep(Record):
    """One step of the network with its weights, on one thread."""

    name: str
    kernel: str
    keep: float | None = None
    n_bytes: Count = 0
    n_dense_bytes: Count = 0
    dense_ms: float | None = None
    sparse_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster; None if torch runs it, or if it was not timed."""
        if self.kernel == "torch" or not self.dense_ms or not self.sparse_ms:
            return None
        return self.dense_ms / self.sparse_ms


class BenchRecord(Record):
    """The result of `sipp bench` for one network."""

    kind: Literal["file bench"]
    format: Literal[2]
    sipp: str
    machine: str
    n_threads: Positive
    network: str
    pruned_hash: str
    bytes: BenchBytes
    runs: Annotated[tuple[BenchRun, ...], Field(strict=False, min_length=1)]  # the fewest points first
    steps: Annotated[tuple[BenchStep, ...], Field(strict=False)]  # of the last run
    step_points: Positive  # points per call in that run
    images: str | None = None  # how images were normalised, in words; None without images
    certified: str | None = None  # what is certified for the stored values, in a few words
    line: str  # smaller, faster, certified

    @property
    def size_headline(self) -> str:
        """How many times smaller the file is than the dense values, or larger."""
        return size_headline(self.bytes.file, self.bytes.dense)

    @property
    def why_larger(self) -> str:
        """The reason why the file grew; empty if it did not."""
        return why_larger(self.bytes.file, self.bytes.dense)
