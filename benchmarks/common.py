"""What the benchmarks share: alternating timings, peak memory, data like a network's, a table, a file of figures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

REPEATS = 7


def alternate(
    *functions: Callable[[], object], repeats: int = REPEATS, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """The best time of each function, in seconds; they take turns, so that a noisy moment meets all of them."""
    best = [float("inf")] * len(functions)
    for function in functions:
        function()
    for _ in range(repeats):
        for i, function in enumerate(functions):
            start = clock()
            function()
            best[i] = min(best[i], clock() - start)
    return best


def clock_for(busy: bool) -> Callable[[], float]:
    """Wall time; on a busy machine the CPU time of one thread, which other programs disturb less."""
    if not busy:
        return time.perf_counter
    torch.set_num_threads(1)
    return time.process_time


def peak_extra_bytes(function: Callable[[], object]) -> int:
    """How far memory rises above what was in use before, while the function runs (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def smooth_images(n_images: int, side: int, seed: int = 0) -> Tensor:
    """Images with structure at several scales, mean 0, deviation 1: neighbours are alike, as in photographs."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        F.interpolate(torch.randn(n_images, 3, k, k, generator=generator), size=(side, side), mode="bicubic") / k**0.5
        for k in (2, 4, 8, 16, side // 2)
    ]
    total = torch.stack(layers).sum(0)
    return (total - total.mean()) / total.std()


def machine() -> str:
    """One line: processor, threads, versions, load."""
    processor = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.split(":")[1].strip()
            break
    load = os.getloadavg()[0]
    return f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}, load {load:.1f}"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints one table."""
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}\n{machine()}")
    for n, row in enumerate(cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))
        if n == 0:
            print("  ".join("-" * width for width in widths))


def write_figures(name: str, work: str, values: Mapping[str, Any]) -> Path:
    """Writes what was measured to `figures/NAME.json`, with its command, commit and machine; `quotes.py` reads it.

    `work` says the shape of the work in words. Values of an earlier run stay where this one has none.
    """
    path = Path(__file__).parent / "figures" / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["values"] if path.is_file() else {}
    git = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False)
    found = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": git.stdout.strip() or "unknown",
        "machine": machine(),
        "work": work,
        "values": before | dict(values),
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path
