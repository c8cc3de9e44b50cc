"""By hand: the kernel tests for several processors that this one can run, and their scores against each other.

    python tests/scoring/kernels/targets.py

Each target compiles into a folder of its own and takes minutes. Scores may differ by 1e-6 between targets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
MOST = 1e-6
TARGETS = {
    "this processor": {},
    "generic (no wide vectors, no fused product)": {"NUMBA_CPU_NAME": "generic"},
    "haswell (AVX2)": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+popcnt"},
    "skylake-avx512, features of this one": {"NUMBA_CPU_NAME": "skylake-avx512"},
}
TESTS = ("test_cpu.py", "test_memory.py", "test_checks.py", "test_range.py")


def main() -> int:
    """0 if all tests pass for every target and no scores differ by more than MOST."""
    is_good, first = True, None
    for name, settings in TARGETS.items():
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, **settings, "NUMBA_CACHE_DIR": folder}
            saved = Path(folder) / "scores.pt"
            command = [sys.executable, str(HERE / "many_ways.py"), str(saved), "max", "mean"]
            subprocess.run(command, env=environment, check=True)
            scores = torch.load(saved)
            tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(str(HERE / t) for t in TESTS)]
            done = subprocess.run(tests, env=environment, capture_output=True, text=True)
        first = scores if first is None else first
        apart = max(float((scores[key] - first[key]).abs().max()) for key in first)
        is_good &= done.returncode == 0 and apart <= MOST
        print(f"{name}: {done.stdout.strip().splitlines()[-1]}; scores {apart:.1e} from the first", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
