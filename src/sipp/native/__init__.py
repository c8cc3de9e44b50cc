"""All that depends on the processor, or on parts of Numba, llvmlite and torch that no other room should know.

    processor.py      what this processor has
    instructions.py   the pieces that vector code is written of, as LLVM instructions
    compiling.py      such pieces and Python loops compiled by Numba, kept in its cache
    machine_code.py   functions written at run time, compiled by LLVM itself; calls of compiled functions on threads
    threads.py        torch's own threads
    memory.py         tensors as compiled code takes them
    pytree.py         nested lists and dicts of tensors
    two_of_four.py    cuSPARSELt, through torch's private operators

`llvmlite`, `numba.core` and `ctypes` are imported here and in no other room (`tests/native/test_only_here.py`). The
versions of numba, llvmlite and torch are pinned from both sides in `pyproject.toml`. What is missing has a plain way:

    vector code for this processor    plain compiled loops (`scoring/kernels/cpu/plain_loops.py`)
    a folder for Numba's cache        compiled anew in each process
    a compiler (NUMBA_DISABLE_JIT)    the float64 definition; the loops of `allocation` as Python runs them
    Numba's events                    the time of compiling is not told
    torch's OpenMP library            plain threads, with the same results
"""
