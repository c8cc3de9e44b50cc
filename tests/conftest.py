"""One thread per test process: pytest runs as many processes as there are cores, and more threads only wait."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
