"""A function in a small part of Python in, LLVM instructions out: what `host.Native` is compiled from.

Numba reads any Python, and took half of the first use after an install for it. The loops of the kernels need little of
Python, and mean here what they mean to Numba. Numbers are int64 and float64, or what a primitive gives and
`np.float32(..)` says (`values.py`). A variable keeps the kind of its first value, and is read only where every way
has set it. There are `a, b = ..`, `if`, `while`, `for .. in range(..)` with steps upwards, `continue`, `return`;
arithmetic, comparisons, `not`, `x if c else y`, and `and`, `or` in conditions; `min`, `max`, `abs`; tuples and records,
which are set once; calls of primitives (`llvm.py`) and of plain functions, which are written in where they are called:
no closure, nothing wrapped, no argument with a default. All else is refused.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numba.core import cgutils, types

from sipp.scoring.kernels.cpu.values import (
    I64,
    INT,
    REAL,
    TRUTH,
    Value,
    arithmetic,
    as_kind,
    common,
    compare,
    extreme,
    in_llvm,
    is_number,
    is_real,
    kind_of,
    magnitude,
    primitive,
    truth,
)

_KINDS = {getattr(np, k.name): k for k in (types.float32, REAL, types.int16, types.int32, INT, types.uint32)}
_ORDERS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
_KNOWN: dict[type, Callable[..., Any]] = {  # of two numbers that are known
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def entry(function: Callable[..., None]) -> Callable[..., None]:
    """A function for Numba to compile and cache, which only calls what this one of whole numbers is written in."""
    names = list(inspect.signature(function).parameters)

    def emit(b: Any, *numbers: Any) -> None:
        write(b, function, [Value(INT, x) for x in numbers])

    given, code = ", ".join(names), inspect.unwrap(function).__code__
    scope = {"_written": primitive(types.none, *[INT] * len(names))(emit), "__name__": function.__module__}
    # Numba's cache goes by the file, the line and the name of a function.
    lines = "\n" * (code.co_firstlineno - 1) + f"def {function.__name__}({given}):\n    _written({given})\n"
    exec(compile(lines, code.co_filename, "exec"), scope)
    made: Callable[..., None] = scope[function.__name__]
    made.__qualname__ = function.__qualname__
    return made


def write(b: Any, function: Callable[..., Any], given: Sequence[Any]) -> Any:
    """Appends the instructions of a function of these values; gives its result, None where it returns none."""
    return _Writer(b, function).run(given)


@functools.cache
def _tree(function: Callable[..., Any]) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


class _Cell(NamedTuple):
    """A variable."""

    kind: Any
    at: Any


class _Writer:
    """Writes one function: `do_X` a statement, `on_X` an expression that Python's `ast` calls X."""

    def __init__(self, b: Any, function: Any) -> None:
        self.b, self.function = b, function
        self.code, self.globals, self.tree = function.__code__, function.__globals__, _tree(function)
        self.names: dict[str, Any] = {}
        # Variables that every way here has set; None: no way leads here
        self.known: frozenset[str] | None = frozenset()
        self.following: list[Any] = []  # where `continue` goes, of the loops around
        self.result: _Cell | None = None
        self.is_silent = False  # a way ends without a result
        self.end = b.append_basic_block("end")
        if function.__closure__ or hasattr(function, "__wrapped__"):
            self.refuse(self.tree)  # its text would not tell what it does

    def run(self, given: Sequence[Any]) -> Any:
        names = self.tree.args.args
        if len(given) != len(names) or len(names) != len(inspect.signature(self.function).parameters):
            self.refuse(self.tree)
        for argument, value in zip(names, given, strict=True):
            self.assign(argument, argument, value)
        self.do_all(self.tree.body)
        if self.result is not None and (self.is_silent or self.known is not None):
            self.refuse(self.tree)
        self.go(self.end)
        self.b.position_at_end(self.end)
        return None if self.result is None else self.read(self.result)

    def refuse(self, node: Any) -> NoReturn:
        line = self.code.co_firstlineno + node.lineno - 1
        text = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node)
        raise TypeError(f"{self.code.co_filename}, line {line}: {text} cannot be compiled")

    def go(self, block: Any) -> None:
        """Goes on in this block, unless the statement before has gone elsewhere."""
        if not self.b.block.is_terminated:
            self.b.branch(block)

    # --- Variables ----------------------------------------------------------------------------------------------------

    def cell(self, kind: Any) -> _Cell:
        return _Cell(kind, cgutils.alloca_once(self.b, in_llvm(kind)))

    def read(self, cell: _Cell) -> Value:
        return Value(cell.kind, self.b.load(cell.at))

    def put(self, node: Any, value: Any, cell: _Cell) -> None:
        """Writes a variable, if its kind holds the value as it is."""
        kind = kind_of(value)
        if kind is not cell.kind and common(kind, cell.kind) is not cell.kind:
            self.refuse(node)
        self.b.store(as_kind(self.b, value, cell.kind), cell.at)

    def assign(self, node: Any, target: Any, value: Any) -> None:
        if isinstance(target, ast.Tuple) and type(value) is tuple:
            for part, its_value in zip(target.elts, value, strict=True):
                self.assign(node, part, its_value)
            return
        name = getattr(target, "id", None) or getattr(target, "arg", None) or self.refuse(node)
        held = self.names.get(name)
        self.known = (self.known or frozenset()) | {name}
        if not is_number(value):
            if held is not None:
                self.refuse(node)  # tuples and records are set once
            self.names[name] = value
            return
        if not isinstance(held, _Cell):
            held = self.names[name] = self.cell(kind_of(value))
        self.put(node, value, held)

    # --- Statements ---------------------------------------------------------------------------------------------------

    def do_all(self, statements: Sequence[ast.stmt]) -> None:
        for node in statements:
            if self.known is None:
                self.refuse(node)
            getattr(self, f"do_{type(node).__name__}", self.refuse)(node)

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.on(node.value)

    def do_Assign(self, node: ast.Assign) -> None:
        value = self.on(node.value)
        for target in node.targets:
            self.assign(node, target, value)

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        left = self.on(node.target)
        value = arithmetic(self.b, left, type(node.op), self.on(node.value)) or self.refuse(node)
        self.assign(node, node.target, value)

    def do_If(self, node: ast.If) -> None:
        with self.b.if_else(self.holds(node.test)) as (then, otherwise):
            before = self.known
            with then:
                self.do_all(node.body)
            with otherwise:
                after, self.known = self.known, before
                self.do_all(node.orelse)
        self.known = after if self.known is None else self.known if after is None else self.known & after

    def do_While(self, node: ast.While) -> None:
        test, body, after = (self.b.append_basic_block(name) for name in ("test", "body", "after"))
        self.b.branch(test)
        self.b.position_at_end(test)
        self.b.cbranch(self.holds(node.test), body, after)
        self.b.position_at_end(body)
        before = self.known
        self.loop(node, test)
        self.known = before  # there may have been no turn
        self.b.position_at_end(after)

    def do_For(self, node: ast.For) -> None:
        start, stop, step = self.range(node)
        count = self.cell(INT)
        self.b.store(start, count.at)
        test, body, following, after = (self.b.append_basic_block(x) for x in ("test", "body", "following", "after"))
        self.b.branch(test)
        self.b.position_at_end(test)
        i = self.read(count)
        self.b.cbranch(self.b.icmp_signed("<", i.code, stop), body, after)
        self.b.position_at_end(body)
        before = self.known
        self.assign(node, node.target, i)
        self.loop(node, following)
        self.known = before  # there may have been no turn
        self.b.position_at_end(following)
        self.b.store(self.b.add(i.code, step, flags=["nsw"]), count.at)
        self.b.branch(test)
        self.b.position_at_end(after)

    def range(self, node: ast.For) -> tuple[Any, Any, Any]:
        if not (isinstance(node.iter, ast.Call) and self.named(node.iter.func) is range):
            self.refuse(node)
        found = [self.on(x) for x in node.iter.args]
        if len(found) == 3 and not isinstance(found[2], Value) and found[2] < 1:
            self.refuse(node)  # a step downwards would end the loop before its first turn
        bounds = [as_kind(self.b, x, INT) for x in found]
        first = bounds if len(bounds) > 1 else [I64(0), *bounds]
        start, stop, step = first if len(first) == 3 else (*first, I64(1))
        return start, stop, step

    def loop(self, node: ast.For | ast.While, following: Any) -> None:
        """The statements in a loop, after which the block `following` comes."""
        if node.orelse:
            self.refuse(node)
        self.following.append(following)
        self.do_all(node.body)
        self.go(self.following.pop())

    def do_Continue(self, node: ast.Continue) -> None:
        self.b.branch(self.following[-1])
        self.known = None

    def do_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.is_silent = True
        else:
            value = self.on(node.value)
            self.result = self.result or self.cell(kind_of(value))
            self.put(node, value, self.result)
        self.b.branch(self.end)
        self.known = None

    # --- Expressions: a Value, a number of Python's, or a tuple of these ----------------------------------------------

    def on(self, node: ast.expr) -> Any:
        return getattr(self, f"on_{type(node).__name__}", self.refuse)(node)

    def on_Constant(self, node: ast.Constant) -> Any:
        return node.value if type(node.value) in (bool, int, float) else self.refuse(node)

    def on_Name(self, node: ast.Name) -> Any:
        if node.id not in self.code.co_varnames:
            found = self.globals.get(node.id)
            return found if type(found) in (int, float) else self.refuse(node)
        if self.known is None or node.id not in self.known:
            self.refuse(node)  # Python has no value for it on some way to here
        held = self.names[node.id]
        return self.read(held) if isinstance(held, _Cell) else held

    def on_Tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self.on(x) for x in node.elts)

    def on_Attribute(self, node: ast.Attribute) -> Any:
        record = self.on(node.value)
        if not (isinstance(record, Value) and isinstance(record.kind, types.NamedUniTuple)):
            self.refuse(node)
        return Value(record.kind.dtype, self.b.extract_value(record.code, record.kind.fields.index(node.attr)))

    def on_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return Value(TRUTH, self.b.not_(self.holds(node.operand)))
        value = self.on(node.operand)
        if not isinstance(node.op, ast.USub) or is_real(kind_of(value)):
            self.refuse(node)
        return arithmetic(self.b, 0, ast.Sub, value) if isinstance(value, Value) else -value

    def on_BinOp(self, node: ast.BinOp) -> Any:
        left, right, operation = self.on(node.left), self.on(node.right), type(node.op)
        if not isinstance(left, Value) and not isinstance(right, Value) and operation in _KNOWN:
            return _KNOWN[operation](left, right)
        return arithmetic(self.b, left, operation, right) or self.refuse(node)

    def on_Compare(self, node: ast.Compare) -> Value:
        if len(node.ops) != 1 or type(node.ops[0]) not in _ORDERS:
            self.refuse(node)
        return compare(self.b, self.on(node.left), _ORDERS[type(node.ops[0])], self.on(node.comparators[0]))

    def holds(self, node: ast.expr) -> Any:
        """LLVM's bit of a condition. Of `and`, `or`, whose values Python gives elsewhere, only the truth is asked here.

        What comes later in them is computed only where it decides.
        """
        if not isinstance(node, ast.BoolOp):
            return truth(self.b, self.on(node))
        found, decided = self.cell(TRUTH), self.b.append_basic_block("decided")
        for part in node.values[:-1]:
            holds, undecided = self.holds(part), self.b.append_basic_block("undecided")
            self.b.store(holds, found.at)
            self.b.cbranch(holds, *((undecided, decided) if isinstance(node.op, ast.And) else (decided, undecided)))
            self.b.position_at_end(undecided)
        self.b.store(self.holds(node.values[-1]), found.at)
        self.b.branch(decided)
        self.b.position_at_end(decided)
        return self.b.load(found.at)

    def on_IfExp(self, node: ast.IfExp) -> Any:
        with self.b.if_else(self.holds(node.test)) as (then, otherwise):
            with then:
                left, left_end = self.on(node.body), self.b.block
            with otherwise:
                right, right_end = self.on(node.orelse), self.b.block
        if type(left) is tuple and type(right) is tuple:
            return tuple(self.joined(x, left_end, y, right_end) for x, y in zip(left, right, strict=True))
        return self.joined(left, left_end, right, right_end)

    def joined(self, left: Any, left_end: Any, right: Any, right_end: Any) -> Value:
        """The number that the code has computed in one of two blocks."""
        kinds = kind_of(left), kind_of(right)
        cell = self.cell(kinds[0] if kinds[0] is kinds[1] else common(*kinds))
        for value, end in ((left, left_end), (right, right_end)):
            with self.b.goto_block(end):
                self.b.store(as_kind(self.b, value, cell.kind), cell.at)
        return self.read(cell)

    # --- Calls --------------------------------------------------------------------------------------------------------

    def on_Call(self, node: ast.Call) -> Any:
        if node.keywords:
            self.refuse(node)
        given: list[Any] = []
        for x in node.args:
            given += self.on(x.value) if isinstance(x, ast.Starred) else [self.on(x)]
        called = self.named(node.func)
        written = getattr(called, "written", None)
        if written is not None:
            values = [as_kind(self.b, x, kind) for x, kind in zip(given, written.arguments, strict=True)]
            return Value(written.result, written.emit(self.b, *values))
        if isinstance(called, FunctionType):
            return write(self.b, called, given)
        return self.of_numbers(called, given) or self.refuse(node)

    def of_numbers(self, called: Any, given: list[Any]) -> Value | None:
        """What Python and NumPy have; None for what is not known here."""
        if called in _KINDS and len(given) == 1 and (is_real(_KINDS[called]) or not is_real(kind_of(given[0]))):
            return Value(_KINDS[called], as_kind(self.b, given[0], _KINDS[called]))
        if called in (min, max) and len(given) == 2:
            return extreme(self.b, "<" if called is min else ">", *given)
        if called is abs and isinstance(given[0], Value) and is_real(given[0].kind):
            return magnitude(self.b, given[0])
        return None

    def named(self, node: ast.expr) -> Any:
        """What a name stands for outside of the function: `min`, `np.float32`, `put_float`."""
        if isinstance(node, ast.Attribute):
            return getattr(self.named(node.value), node.attr)
        if not isinstance(node, ast.Name) or node.id in self.code.co_varnames:
            self.refuse(node)
        return self.globals.get(node.id, getattr(builtins, node.id, None))
