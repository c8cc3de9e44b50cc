"""Everything that depends on the processor, or on private parts of Numba, llvmlite and torch.

    processor.py      what this processor has
    vector.py         building blocks of vector code: helpers that emit LLVM instructions
    compiling.py      functions compiled by Numba, with its cache on disk, and called on threads
    machine_code.py   functions generated at run time and compiled by LLVM
    threads.py        work on torch's own thread pool
    memory.py         tensors as compiled code needs them
    pytree.py         nested lists and dicts of tensors
    exporting.py      torch.export without its noise
    two_of_four.py    cuSPARSELt, through torch's private operators

`llvmlite`, `numba.core`, `ctypes` and `torch.utils._pytree` are imported here and in no other room
(`tests/native/test_only_here.py`). The versions of numba, llvmlite and torch have lower and upper bounds in
`pyproject.toml`. Each has a fallback:

    vector code for this processor    plain compiled loops (`scoring/kernels/plain_loops.py`); `sparse`: torch
    a folder for Numba's cache        compiled anew in each process
    a compiler (NUMBA_DISABLE_JIT)    the float64 definition; `sparse`: torch
    torch's OpenMP library            plain threads (generated code: one), with the same results
"""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.native import (
        compiling as compiling,
        machine_code as machine_code,
        memory as memory,
        processor as processor,
        pytree as pytree,
        threads as threads,
        two_of_four as two_of_four,
        vector as vector,
    )
    from sipp.native.exporting import (
        quiet_export as quiet_export,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
