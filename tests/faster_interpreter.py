"""Triton's interpreter without the work that it repeats for every operation; what kernels compute stays as it is.

Imported first by the files that run kernels by the interpreter. All are private names, which another Triton may not
have: it is then as slow as it was.
"""

import functools
import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

NAMES = ("_LangPatchScope", "_get_np_dtype", "_patch_lang", "ReduceOps")
POINTER = np.dtype(np.uint64)


def _np_dtype(of: Any) -> np.dtype[Any]:
    return POINTER if isinstance(of.scalar, tl.pointer_type) else _dtype_of_scalar(of.scalar)


def _patch_once(fn: Any) -> Any:
    """Looks through all names of the language where they are still the compiler's, not at each call within a kernel."""
    langs = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
    is_patched = not any(tl.core.is_builtin(name) for name in (tl.tensor.to, *(lang.load for lang in langs)))
    return interpreter._LangPatchScope() if is_patched else _patch(fn)


def _reduce_by_halves(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """A reduction of one tensor by a function of the kernel's own, as a GPU does it: not element by element."""
    (tensor,) = given
    data = np.moveaxis(tensor.handle.data, self.axis, 0)
    while (half := len(data) // 2) >= 1:
        assert len(data) == 2 * half  # Triton's blocks are powers of two
        halves = (self.to_tensor(part, tensor.dtype) for part in (data[:half], data[half:]))
        data = self.combine_fn.fn(*halves).handle.data.reshape(half, *data.shape[1:])
    return [self.to_tensor(np.expand_dims(data[0], self.axis) if self.keep_dims else data[0], tensor.dtype)]


if all(hasattr(interpreter, name) for name in NAMES):
    _dtype_of_scalar = functools.cache(interpreter._get_np_dtype)  # makes a table of 18 types, 100,000 times
    _patch = interpreter._patch_lang
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang = _patch_once
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves
