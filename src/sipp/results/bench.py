"""The result of `bench`: bytes and times of one network."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sipp.results import words
from sipp.results.sheet import Sheet, Table, shown

TAIL = 0.1  # share of pairs left out on either side of the spread
LEAST_GAIN = 1.05  # a smaller speed-up counts as equal
TICK = 1e-9  # seconds: no call takes less
MILLISECONDS = "{:.3f}".format
RUN_WORDS = (
    "torch: PyTorch running the same pruned network, zeros included; off by: relative difference of the outputs; "
    "speed: the median over pairs of calls that take turns, and the range of the middle 80 %"
)
STEADY = 1.2  # a spread with a smaller ratio of its ends counts as one speed


@dataclass(frozen=True)
class Speed:
    """How many times faster: the median over pairs of alternating calls, and the range of the middle 80 %."""

    ratio: float
    low: float
    high: float
    runs_dense: bool = False  # torch runs all of it on both sides

    ALSO_IN_JSON = ("words",)

    @classmethod
    def of(cls, sparse: Sequence[float], dense: Sequence[float], *, runs_dense: bool) -> Speed:
        """The speed-up over pairs of alternating calls, which ran under the same load."""
        pairs = zip(dense, sparse, strict=True)
        ratios = sorted(dense_time / max(sparse_time, TICK) for dense_time, sparse_time in pairs)
        left_out = int(TAIL * len(ratios))
        return cls(statistics.median(ratios), ratios[left_out], ratios[-1 - left_out], runs_dense)

    @property
    def headline(self) -> str:
        """The speed in three words; without a number if the pairs of calls disagree on which is faster."""
        if self.runs_dense:
            return "run by torch"
        if self.low > 1 and self.ratio >= LEAST_GAIN:
            return f"{_two_digits(self.ratio)} x faster"
        if self.high < 1 and self.ratio * LEAST_GAIN <= 1:
            return f"{_two_digits(1 / self.ratio)} x slower"
        return "as fast as torch" if self.high <= STEADY * self.low else "not clear"

    @property
    def words(self) -> str:
        """The speed with its spread, or why none is given."""
        if self.runs_dense:
            return f"{self.headline}: nothing gained"
        if self.headline == "not clear":
            return "timings vary too much here to tell; is the machine busy?"
        ends = (self.low, self.high) if self.ratio >= 1 else (1 / self.high, 1 / self.low)
        return f"{self.headline} ({_two_digits(ends[0])} to {_two_digits(ends[1])})"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{float(f'{value:.2g}'):,.0f}"


@dataclass(frozen=True)
class BenchRun:
    """Timings of dense and sparse calls with `n_inputs` inputs: medians over alternating calls."""

    n_inputs: int
    dense_ms: float
    sparse_ms: float
    faster: Speed  # than dense, over pairs of calls
    off_by: float  # of the outputs, relative to the largest

    @property
    def speed(self) -> str:
        return self.faster.words


@dataclass(frozen=True)
@shown
class Bench:
    """Size and speed of one network. `print` it."""

    machine: str
    n_threads: int
    network: str  # its class
    pruned_hash: str
    file_bytes: int
    dense_bytes: int  # before pruning
    bound_bytes: float  # values and the entropy of their positions
    memory_bytes: int  # of weights, while it runs
    memory_dense_bytes: int
    runs: tuple[BenchRun, ...]  # the fewest points first

    ALSO_IN_JSON = ("sentence",)

    @property
    def sentence(self) -> str:
        """How much smaller and faster it is."""
        run = self.runs[-1]
        return (
            f"{words.size(self.file_bytes, self.dense_bytes)} as a small file ({self.file_bytes:,} bytes, before "
            f"pruning {self.dense_bytes:,}); {words.counted(run.n_inputs, 'input')} per call, "
            f"{words.counted(self.n_threads, 'thread')}: {run.faster.words}"
        )

    @property
    def sheet(self) -> Sheet:
        entropy = words.of_bytes(round(self.bound_bytes))
        file, memory = (
            f"{words.of_bytes(now)}, before pruning {words.of_bytes(before)}"
            for now, before in (
                (self.file_bytes, self.dense_bytes), (self.memory_bytes, self.memory_dense_bytes),
            )
        )  # fmt: skip
        facts = (
            ("network", f"{self.network} on {self.machine}, {words.counted(self.n_threads, 'thread')}"),
            ("file", f"{file} (values and the entropy of their positions: {entropy})"),
            ("in memory", f"weights of {memory}"),
        )
        columns = {
            "inputs": "n_inputs", "ms torch": "dense_ms", "ms sparse": "sparse_ms", "off by": "off_by",
            "speed": "speed",
        }  # fmt: skip
        forms = {"ms torch": MILLISECONDS, "ms sparse": MILLISECONDS, "off by": "{:.0e}".format}
        bars = ("ms torch", "ms sparse")
        table = Table.of(self.runs, columns, texts=("speed",), bars=bars, words=RUN_WORDS, forms=forms)
        return Sheet(self.sentence, facts, (table,), "print(sipp.sparse(pruned, example)) shows every step")
