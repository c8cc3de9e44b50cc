"""One thread per test process: pytest runs as many processes as there are cores, and more threads only wait."""

import gc
import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# The tests that ask for several threads share their cores with others: a thread that waits sleeps, and does not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

gc.disable()  # while modules are loaded and tests collected, which keep nearly all they make


def pytest_collection_finish() -> None:
    """Python's collector of cycles starts, and passes over what is loaded: torch alone makes half a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
