"""One thread per test process: pytest runs as many processes as there are cores, and more threads only wait."""

import contextlib
import functools
import gc
import logging
import os
import shutil
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Rules = dict[Any, Any]  # {operation of torch: what it becomes}

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# The tests that ask for several threads share their cores with others: a thread that waits sleeps, and does not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Dozens of tests start Python anew: what is compiled is kept, or each of them would compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nobody cuts the power here, and disks are slow: tests of the order of writes count the calls, and processes that tests
# start wait for the disk as users do. As the real one it refuses what is no open file.
os.fsync = lambda descriptor: os.fstat(descriptor) and None
# Tests make and remove thousands of folders, and a disk may take milliseconds to remove one: they lie in memory where
# there is room. A TMPDIR that is set is kept.
MEMORY, ROOM = "/dev/shm", 4 << 30
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM:
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY

gc.disable()  # while modules are loaded and tests collected, which keep nearly all they make


# Files with a test of ten seconds or more, most of them of other processes: begun last, one would keep a core waiting.
LONG = {
    "test_same_bits.py", "test_ray.py", "test_gpu_kernels.py", "test_plain.py", "test_hostile_folders.py",
    "test_processes.py", "test_runs.py", "test_notebook.py", "test_mismatches.py", "test_paths.py", "test_examples.py",
    "test_docs.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Python's collector of cycles starts, and passes over what is loaded: torch alone makes half a million objects."""
    if "torch" in sys.modules:  # not where other processes run the tests
        _spare_torch_what_changes_no_result()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # an export alone makes and drops a hundred thousand
    gc.enable()


def _spare_torch_what_changes_no_result() -> None:
    """Skips work that torch would repeat in thousands of tests; results stay the same."""
    import torch
    from torch._export import utils
    from torch._subclasses import fake_impls
    from torch.export import exported_program

    # torch.manual_seed notes where it was called, with the lines of all callers, once for each kind of device not there
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.traceback = types.SimpleNamespace(format_stack=list)
    # an export writes for each operation by which lines it was reached, and tells all it does to a log, to which pytest
    # listens: one that is not the named one has no listeners
    torch.fx.proxy.CapturedTraceback = types.SimpleNamespace(extract=lambda: types.SimpleNamespace(summary=list))
    torch._logging._internal.trace_log = logging.Logger("of no one")
    # it declares 12,000 functions whose annotations are evaluated: those of `typing` remember what they were
    torch._ops.Callable = typing.Callable
    # and asks 26 times for the names of all operations in C++, which are the same each time
    if hasattr(utils, "_materialize_cpp_cia_ops"):  # a private name, which another torch may not have
        utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
    # and twice enters what it changes of 260 of them, 22 functions each, into tables that it empties behind itself
    if hasattr(exported_program, "_override_composite_implicit_decomp"):
        exported_program._override_composite_implicit_decomp = _made_once(
            exported_program._override_composite_implicit_decomp, fake_impls.op_implementations_dict
        )


def _made_once(
    override: Callable[[Rules], contextlib.AbstractContextManager[None]], fakes: dict[Any, Any]
) -> Callable[[Rules], contextlib.AbstractContextManager[None]]:
    """torch's `override` of operations, cached as long as its tables and rules are the same."""
    made: dict[Any, tuple[Any, Any, Any, Any]] = {}  # of an operation: the table before, the rule, the table, the fake

    @contextlib.contextmanager
    def overridden(rules: Rules) -> Iterator[None]:
        before = {op: op.py_kernels.copy() for op in rules}
        if any(op not in made or made[op][:2] != (before[op], rule) for op, rule in rules.items()):
            with override(rules):
                made.update({op: (before[op], rule, op.py_kernels.copy(), fakes.get(op)) for op, rule in rules.items()})
                yield
            return
        for op in rules:
            op.py_kernels.update(made[op][2])
            op._dispatch_cache.clear()
            if made[op][3] is not None:
                fakes.setdefault(op, made[op][3])
        try:
            yield
        finally:
            for op in rules:
                op.py_kernels.clear()
                op.py_kernels.update(before[op])
                op._dispatch_cache.clear()
                fakes.pop(op, None)

    return overridden
