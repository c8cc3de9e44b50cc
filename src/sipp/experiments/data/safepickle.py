"""Plain Python values and uint8 arrays out of a pickle file, with no code of the file's choosing ever run.

Why it is here: the Python version of CIFAR-10, which torchvision downloads and many machines hold already, is a set of
pickles. `torch.load(weights_only=True)` does not read them, and `pickle.load` would run whatever is in the file
before its checksum can be compared. Without this reader such users would have to download the binary version again.

A pickle is a program. This reader first walks over the program without running it (only known instructions, lengths
that fit into the file, memo numbers that cannot blow up memory), then runs it with a table of names that holds a few
inert stand-ins and nothing else: numpy itself is not reachable from inside the file.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sipp.errors import DataError

MAX_BYTES = 64 * 2**20  # a CIFAR-10 batch has 31 MB
MAX_ITEMS = 10**6  # memo entries and instructions; a CIFAR-10 batch has about 60,000
MESSAGE_LENGTH = 200  # of a reason, which may quote the file
OPCODE_NAMES = """
    PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 BINFLOAT
    STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES UNICODE BINUNICODE SHORT_BINUNICODE
    EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
    PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD
"""  # enough for numbers, text and arrays; no instruction that makes objects by other ways than a named call
OPCODES = frozenset(OPCODE_NAMES.split())
MEMO_WRITES = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
UINT8_NAMES = ("u1", b"u1", "|u1", b"|u1", "uint8", b"uint8")


class _Name:
    """What a name in the file leads to: it can be called, and the file cannot change it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., object]) -> None:
        self._make = make

    def __call__(self, *args: object) -> object:
        return self._make(*args)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("an attempt to change a name")


class _Dtype:
    """Stands for `numpy.dtype`: remembers that it is uint8, and can be nothing else."""

    def __init__(self, name: object, align: object = False, copy: object = False) -> None:
        if name not in UINT8_NAMES:
            raise pickle.UnpicklingError(f"an array of element type {name!r}")

    def __setstate__(self, state: object) -> None:
        pass  # byte order and field names: none of them mean anything for uint8


class _Array:
    """Stands for an array under construction: checks shape against bytes, then holds a copy-free uint8 view."""

    def __init__(self) -> None:
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if type(dtype) is not _Dtype or type(raw) is not bytes or not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError("an array whose shape, element type and bytes do not fit together")
        # A view: it takes no memory, and a shape that does not fit the bytes is an error here.
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def _reconstruct(array_type: object, shape: object, code: object) -> _Array:
    if array_type is not NDARRAY:
        raise pickle.UnpicklingError("an array of an unknown class")
    return _Array()


def _latin1(text: object, encoding: object) -> bytes:
    """The bytes that Python 3 writes as `_codecs.encode(text, 'latin1')` in old protocols."""
    if type(text) is not str or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"bytes in encoding {encoding!r}")
    return text.encode("latin-1")


def _refuse(*args: object) -> None:
    raise pickle.UnpicklingError("an array made in an unknown way")


NDARRAY = _Name(_refuse)
ALLOWED: dict[tuple[str, str], _Name] = {
    ("numpy.core.multiarray", "_reconstruct"): _Name(_reconstruct),
    ("numpy._core.multiarray", "_reconstruct"): _Name(_reconstruct),
    ("numpy", "ndarray"): NDARRAY,
    ("numpy", "dtype"): _Name(_Dtype),
    ("_codecs", "encode"): _Name(_latin1),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"the name {module}.{name}")
        return ALLOWED[module, name]

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("a persistent id")


def _scan(raw: bytes) -> None:
    """Raises UnpicklingError where the program holds an instruction, a length or a number that has no business."""
    for n_seen, (opcode, arg, _) in enumerate(pickletools.genops(raw)):
        if opcode.name not in OPCODES:
            raise pickle.UnpicklingError(f"the instruction {opcode.name}")
        if n_seen > MAX_ITEMS or (opcode.name in MEMO_WRITES and not 0 <= int(arg or 0) <= MAX_ITEMS):
            raise pickle.UnpicklingError("more entries than any such file has")


def load_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle file: values are numbers, text, bytes, lists, dictionaries and uint8 arrays only."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise DataError(f"{size} bytes are too many for a batch file; it was not opened", where=path)
    raw = path.read_bytes()
    try:
        _scan(raw)
        value = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:  # a malformed pickle can raise nearly anything; none of it is a claim about the data
        raise DataError(
            f"refused as a data file because of {str(error)[:MESSAGE_LENGTH]} (only numbers, text, lists "
            "and uint8 arrays are read, and nothing in it was run)",
            where=path,
            fix="take the file from the official archive again",
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"holds a {type(value).__name__}, not the dictionary of a batch file", where=path)
    plain = {key.decode("latin-1") if isinstance(key, bytes) else key: item for key, item in value.items()}
    return {key: item.value if isinstance(item, _Array) else item for key, item in plain.items()}
