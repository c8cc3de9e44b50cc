"""The instruction sets of this machine's processor."""

from __future__ import annotations

import platform

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba

PROCESSOR = platform.machine()


def _features() -> str:
    """The processor features that generated code may use, in LLVM's notation; Numba's settings apply."""
    configured: str | None = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    if configured is not None:
        return configured
    try:
        features = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this processor
        return ""
    if not numba.config.ENABLE_AVX:  # type: ignore[attr-defined]
        features.update({name: False for name in features if name.startswith("avx")})
    return str(features.flatten())


FEATURES = _features()
NAME: str = numba.config.CPU_NAME or llvm.get_host_cpu_name()  # type: ignore[attr-defined]  # NUMBA_CPU_NAME=generic helps where LLVM is wrong
_FOUND = FEATURES.split(",")
IS_COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
# The vector code is portable LLVM, but its tiles are tuned for these processors and it was tested on no others.
HAS_VECTOR_CODE = IS_COMPILED and PROCESSOR.lower() in ("x86_64", "amd64")
HAS_AVX2 = "+avx2" in _FOUND
WIDEST = 16  # floats of the widest vector register of any processor
WIDE = "+avx512f" in _FOUND
REGISTERS, LANES = (32, WIDEST) if WIDE else (16, 8)  # vector registers, and the floats of one
HAS_FUSED = "+fma" in _FOUND or PROCESSOR in ("aarch64", "arm64")  # fused multiply-add
