"""Everything that depends on the processor, or on private parts of Numba, llvmlite and torch.

    processor.py      what this processor has
    instructions.py   building blocks of vector code: helpers that emit LLVM instructions
    compiling.py      functions compiled by Numba, with its cache on disk, and called on threads
    machine_code.py   functions generated at run time and compiled by LLVM
    threads.py        work on torch's own thread pool
    memory.py         tensors as compiled code needs them
    pytree.py         nested lists and dicts of tensors
    exporting.py      torch.export without its noise
    two_of_four.py    cuSPARSELt, through torch's private operators

`llvmlite`, `numba.core` and `ctypes` are imported here and in no other room (`tests/native/test_only_here.py`). The
versions of numba, llvmlite and torch have lower and upper bounds in `pyproject.toml`. Each has a fallback:

    vector code for this processor    plain compiled loops (`scoring/kernels/cpu/plain_loops.py`)
    a folder for Numba's cache        compiled anew in each process
    a compiler (NUMBA_DISABLE_JIT)    the float64 definition; the loops of `allocation` as Python runs them
    Numba's events                    compile time is not reported
    torch's OpenMP library            plain threads (generated code: one), with the same results
"""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.native import (
        memory as memory,
        pytree as pytree,
        two_of_four as two_of_four,
    )
    from sipp.native.compiling import (
        INT as INT,
        INT64_BYTES as INT64_BYTES,
        REAL as REAL,
        VOID as VOID,
        CompiledLoop as CompiledLoop,
        as_numbers as as_numbers,
        call_each as call_each,
        calling as calling,
        compiled as compiled,
        double_at as double_at,
        float_at as float_at,
        inlined as inlined,
        int_at as int_at,
        long_at as long_at,
        primitive as primitive,
        put_double as put_double,
        put_float as put_float,
        put_int as put_int,
        put_long as put_long,
        put_short as put_short,
        reading as reading,
        short_at as short_at,
    )
    from sipp.native.exporting import (
        quiet_export as quiet_export,
    )
    from sipp.native.instructions import (
        F32 as F32,
        F64 as F64,
        FLOAT_BYTES as FLOAT_BYTES,
        I1 as I1,
        I8 as I8,
        I16 as I16,
        I32 as I32,
        I64 as I64,
        across as across,
        address_of as address_of,
        call as call,
        constant as constant,
        each as each,
        floats_on_heap as floats_on_heap,
        fused as fused,
        load as load,
        maximum as maximum,
        minimum as minimum,
        pick as pick,
        splat as splat,
        store as store,
        transposed as transposed,
        tree as tree,
        variables as variables,
        vector as vector,
    )
    from sipp.native.machine_code import (
        Arguments as Arguments,
        argument_list as argument_list,
        bits_of as bits_of,
        generate as generate,
        run as run,
    )
    from sipp.native.memory import (
        give_back_freed as give_back_freed,
        give_back_large_pieces as give_back_large_pieces,
    )
    from sipp.native.processor import (
        HAS_AVX2 as HAS_AVX2,
        HAS_VECTOR_CODE as HAS_VECTOR_CODE,
        IS_COMPILED as IS_COMPILED,
        LANES as LANES,
        PROCESSOR as PROCESSOR,
        WIDE as WIDE,
    )
    from sipp.native.threads import (
        cut_evenly as cut_evenly,
        run_parallel as run_parallel,
        threads_for as threads_for,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
