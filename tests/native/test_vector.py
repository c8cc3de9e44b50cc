"""The building blocks of generated code, each run by itself."""

import numpy as np
import pytest

from sipp.native import machine_code, processor, vector

pytestmark = pytest.mark.skipif(not processor.HAS_VECTOR_CODE, reason="no vector code for this processor")


def run(name, emit, n_shares=1, n_threads=1, **arguments):
    """Runs what `emit(b, args)` writes, on arrays and numbers."""
    numbers = {key: value if isinstance(value, int) else value.ctypes.data for key, value in arguments.items()}
    code = machine_code.generate(("test", name), numbers, emit)
    machine_code.run(code, machine_code.argument_list(code, numbers), n_shares, n_threads)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_transposed(n):
    x, out = np.arange(n * n, dtype=np.float32).reshape(n, n), np.zeros((n, n), np.float32)

    def emit(b, args):
        rows = [vector.load(b, args.number("x"), vector.of(n), vector.FLOAT_BYTES * n * i) for i in range(n)]
        for i, column in enumerate(vector.transposed(b, rows)):
            vector.store(b, column, args.number("out"), vector.FLOAT_BYTES * n * i)

    run(("transposed", n), emit, x=x, out=out)
    np.testing.assert_array_equal(out, x.T)


@pytest.mark.parametrize(
    ("letters", "tree"), [("a", "a"), ("ab", "(ab)"), ("abc", "((ab)c)"), ("abcde", "(((ab)(cd))e)")]
)
def test_a_tree_joins_neighbours(letters, tree):
    assert vector.tree(None, lambda b, left, right: f"({left}{right})", letters) == tree


@pytest.mark.parametrize("lanes", [1, 2, 8, 16])
def test_across_joins_halves(lanes):
    x, out = np.random.default_rng(0).standard_normal(lanes).astype(np.float32), np.zeros(2, np.float32)

    def emit(b, args):
        value = vector.load(b, args.number("x"), vector.of(lanes))
        total = vector.across(b, lambda b, left, right: b.fadd(left, right), value)
        vector.store(b, total, args.number("out"))
        vector.store(b, vector.across(b, vector.maximum, value), args.number("out"), vector.FLOAT_BYTES)

    run(("across", lanes), emit, x=x, out=out)
    halves = x
    while len(halves) > 1:
        halves = halves[: len(halves) // 2] + halves[len(halves) // 2 :]
    assert out.tolist() == [halves[0], x.max()]


@pytest.mark.parametrize("n", [0, 1, 7, 100])
@pytest.mark.parametrize(("n_shares", "n_threads"), [(1, 1), (3, 1), (12, 2), (150, 2)])
def test_every_task_belongs_to_one_share(n, n_shares, n_threads):
    counts = np.zeros(max(n, 1), np.int64)

    def emit(b, args):
        with vector.each(b, *args.share(args.number("n"))) as task:
            place = vector.address_of(b, args.number("counts"), task, vector.LONG_BYTES)
            vector.store(b, b.add(vector.load(b, place, vector.I64), vector.I64(1)), place)

    run("shares", emit, n_shares, n_threads, n=n, counts=counts)
    assert (counts[:n] == 1).all()
