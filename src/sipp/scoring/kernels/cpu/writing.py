"""A function in a small part of Python in, LLVM instructions out: what `host.Native` is compiled from.

Numba reads any Python, and took more than half of the first use after an install for that. The loops of the kernels
need little of it, and mean here what they mean there: numbers are int64 and float64, or what a primitive gives and
`np.float32(..)` says; a variable keeps the kind of its first value; whole numbers wrap around. There are variables,
`a, b = ..`, `if`, `while`, `for .. in range(..)` with steps upwards, `continue`, `return`; arithmetic, comparisons,
`and`, `or`, `not`, `x if c else y`, `min`, `max`, `abs` of floats; records and tuples, which are set once; calls of
primitives (`llvm.py`) and of plain functions, which are written in at the place of the call. Everything else is refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import textwrap
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic


class Primitive(NamedTuple):
    """What is called in LLVM instructions: the kinds of its result and arguments, and emit(builder, *values)."""

    result: Any
    arguments: tuple[Any, ...]
    emit: Callable[..., Any]


class Value(NamedTuple):
    """A number or a record that the code computes. A number that is known already is one of Python's."""

    kind: Any  # Numba's type
    code: Any


class Cell(NamedTuple):
    """A variable."""

    kind: Any
    at: Any


_INT, _REAL, _TRUTH = types.int64, types.float64, types.boolean
_NUMBERS = {getattr(np, k.name): k for k in (types.float32, _REAL, types.int16, types.int32, _INT, types.uint32)}
_PYTHON: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_WHOLE = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.LShift: "shl"}
_REALS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_ORDERS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


def primitive(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: `emit(builder, *values)`, which writes LLVM code, becomes a function for compiled code to call."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def typed(typingctx: Any, *given: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if result is types.none else made

            return result(*arguments), codegen

        # Numba passes arguments by name, so the signature is that of `emit`, one name for each argument
        names = ("typingctx", *(f"x{i}" for i in range(len(arguments))))
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        made = intrinsic(typed)
        made.written = Primitive(result, arguments, emit)
        return made

    return wrap


def entry(function: Callable[..., None]) -> Callable[..., None]:
    """A function for Numba to compile and cache: it calls the instructions that this one of whole numbers is written in."""
    names = list(inspect.signature(function).parameters)

    def emit(b: Any, *numbers: Any) -> None:
        write(b, function, [Value(_INT, x) for x in numbers])

    given, code = ", ".join(names), function.__code__
    scope: dict[str, Any] = {"_body": primitive(types.none, *[_INT] * len(names))(emit), "__name__": function.__module__}
    # Numba's cache asks for the file and the line of a function, and its name.
    lines = "\n" * (code.co_firstlineno - 1) + f"def {function.__name__}({given}):\n    _body({given})\n"
    exec(compile(lines, code.co_filename, "exec"), scope)
    made: Callable[..., None] = scope[function.__name__]
    made.__qualname__ = function.__qualname__
    return made


def write(b: Any, function: Callable[..., Any], given: Sequence[Any]) -> Any:
    """Appends the instructions of a function of these values; its result, None where it returns none."""
    return _Writer(b, function).run(given)


@functools.cache
def _parsed(function: Callable[..., Any]) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def _kind_of(kind: Any) -> Any:
    """The LLVM type of a number."""
    if kind is _TRUTH:
        return ir.IntType(1)
    if isinstance(kind, types.Float):
        return ir.FloatType() if kind.bitwidth == 32 else ir.DoubleType()
    return ir.IntType(kind.bitwidth)


def _common(left: Any, right: Any) -> Any:
    """What two kinds of numbers meet in, as Numba has it."""
    if left is right and (left is _TRUTH or isinstance(left, types.Float)):
        return left
    if isinstance(left, types.Float) or isinstance(right, types.Float):
        return _REAL
    return types.uint64 if not (_is_signed(left) or _is_signed(right)) else _INT


def _is_signed(kind: Any) -> bool:
    return bool(kind is not _TRUTH and kind.signed)


class _Writer:
    """Writes one function: `b` is where, `names` its variables, `globals` what else it may name."""

    def __init__(self, b: Any, function: Callable[..., Any]) -> None:
        self.b, self.function = b, function
        self.names: dict[str, Any] = {}
        self.steps: list[Any] = []  # where `continue` goes, of the loops around
        self.result: Any = None
        self.end: Any = None

    def run(self, given: Sequence[Any]) -> Any:
        tree = _parsed(self.function)
        for argument, value in zip(tree.args.args, given, strict=True):
            self.assign(argument, argument.arg, value)
        self.end = self.b.append_basic_block("end")
        self.block(tree.body)
        if not self.b.block.is_terminated:
            self.b.branch(self.end)
        self.b.position_at_end(self.end)
        return None if self.result is None else self.read(self.result)

    def refuse(self, node: Any) -> NoReturn:
        line = self.function.__code__.co_firstlineno + node.lineno - 1
        raise TypeError(f"{self.function.__code__.co_filename}, line {line}: {ast.unparse(node)} cannot be compiled")

    # --- Statements ---------------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt]) -> None:
        for node in statements:
            getattr(self, f"do_{type(node).__name__}", self.refuse)(node)

    def do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.value(node.value)

    def do_Assign(self, node: ast.Assign) -> None:
        value, target = self.value(node.value), node.targets[0]
        if isinstance(target, ast.Name):
            self.assign(node, target.id, value)
        elif isinstance(target, ast.Tuple) and isinstance(value, tuple) and len(node.targets) == 1:
            for name, part in zip(target.elts, value, strict=True):
                self.assign(node, name.id if isinstance(name, ast.Name) else self.refuse(node), part)
        else:
            self.refuse(node)

    def do_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.target, ast.Name):
            self.refuse(node)
        name = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        value = self.value(ast.copy_location(ast.BinOp(name, node.op, node.value), node))
        self.assign(node, node.target.id, value)

    def do_If(self, node: ast.If) -> None:
        with self.b.if_else(self.truth(node.test)) as (then, otherwise):
            with then:
                self.block(node.body)
            with otherwise:
                self.block(node.orelse)

    def do_While(self, node: ast.While) -> None:
        test, body, after = (self.b.append_basic_block(name) for name in ("test", "body", "after"))
        self.b.branch(test)
        self.b.position_at_end(test)
        self.b.cbranch(self.truth(node.test), body, after)
        self.loop(node, body, test)
        self.b.position_at_end(after)

    def do_For(self, node: ast.For) -> None:
        call, name = node.iter, node.target
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
            self.refuse(node)
        bounds = [self.number(self.value(x), _INT) for x in call.args]
        start, stop, step = (bounds if len(bounds) > 1 else [ir.IntType(64)(0), *bounds]) + [ir.IntType(64)(1)] * (
            len(bounds) < 3
        )
        count = cgutils.alloca_once_value(self.b, start)
        test, body, following, after = (self.b.append_basic_block(x) for x in ("test", "body", "following", "after"))
        self.b.branch(test)
        self.b.position_at_end(test)
        i = self.b.load(count)
        self.b.cbranch(self.b.icmp_signed("<", i, stop), body, after)
        self.b.position_at_end(body)
        self.assign(node, name.id if isinstance(name, ast.Name) else self.refuse(node), Value(_INT, i))
        self.loop(node, body, following)
        self.b.position_at_end(following)
        self.b.store(self.b.add(i, step, flags=["nsw"]), count)
        self.b.branch(test)
        self.b.position_at_end(after)

    def loop(self, node: ast.For | ast.While, body: Any, following: Any) -> None:
        """The statements of a loop, from the block `body` on, after which `following` comes."""
        self.b.position_at_end(body)
        self.steps.append(following)
        self.block(node.body)
        self.steps.pop()
        if not self.b.block.is_terminated:
            self.b.branch(following)

    def do_Continue(self, node: ast.Continue) -> None:
        self.b.branch(self.steps[-1])

    def do_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            value = self.value(node.value)
            if self.result is None:
                self.result = self.cell(value)
            self.put(node, value, self.result)
        self.b.branch(self.end)

    # --- Variables ----------------------------------------------------------------------------------------------------

    def cell(self, value: Any) -> Cell:
        kind = self.kind(value)
        return Cell(kind, cgutils.alloca_once(self.b, _kind_of(kind)))

    def read(self, cell: Cell) -> Value:
        return Value(cell.kind, self.b.load(cell.at))

    def assign(self, node: Any, name: str, value: Any) -> None:
        known = self.names.get(name)
        if isinstance(value, tuple) and not (isinstance(value, Value) and isinstance(value.kind, types.Number | types.Boolean)):
            if known is not None:
                self.refuse(node)  # records and tuples are set once
            self.names[name] = value
            return
        if not isinstance(known, Cell):
            known = self.names[name] = self.cell(value)
        self.put(node, value, known)

    def put(self, node: Any, value: Any, cell: Cell) -> None:
        """Writes a variable, whose kind holds the value as it is."""
        if self.kind(value) is not cell.kind and _common(self.kind(value), cell.kind) is not cell.kind:
            self.refuse(node)
        self.b.store(self.number(value, cell.kind), cell.at)

    # --- Expressions: a Value, a number of Python, or a tuple of these --------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        return getattr(self, f"on_{type(node).__name__}", self.refuse)(node)

    def kind(self, value: Any) -> Any:
        if isinstance(value, Value):
            return value.kind
        return {bool: _TRUTH, int: _INT, float: _REAL}[type(value)]

    def number(self, value: Any, kind: Any) -> Any:
        """The LLVM value of a number, as this kind."""
        if not isinstance(value, Value):
            constant = _kind_of(self.kind(value))(value)
            return self.number(Value(self.kind(value), constant), kind)
        (held, code), target = value, _kind_of(kind)
        if held is kind:
            return code
        if isinstance(held, types.Float) and isinstance(kind, types.Float):
            return self.b.fptrunc(code, target) if kind.bitwidth < held.bitwidth else self.b.fpext(code, target)
        if isinstance(kind, types.Float):
            return self.b.sitofp(code, target) if _is_signed(held) else self.b.uitofp(code, target)
        if target.width <= code.type.width:
            return code if target.width == code.type.width else self.b.trunc(code, target)
        return self.b.sext(code, target) if _is_signed(held) else self.b.zext(code, target)

    def truth(self, node: ast.expr) -> Any:
        value = self.value(node)
        if self.kind(value) is _TRUTH:
            return self.number(value, _TRUTH)
        return self.b.icmp_signed("!=", self.number(value, _INT), ir.IntType(64)(0))

    def on_Constant(self, node: ast.Constant) -> Any:
        return node.value if type(node.value) in (bool, int, float) else self.refuse(node)

    def on_Name(self, node: ast.Name) -> Any:
        held = self.names.get(node.id)
        if isinstance(held, Cell):
            return self.read(held)
        if held is not None:
            return held
        found = self.function.__globals__.get(node.id)  # type: ignore[attr-defined]
        return found if type(found) in (int, float) else self.refuse(node)

    def on_Tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self.value(x) for x in node.elts)

    def on_Attribute(self, node: ast.Attribute) -> Any:
        record = self.value(node.value)
        if not (isinstance(record, Value) and isinstance(record.kind, types.NamedUniTuple)):
            self.refuse(node)
        return Value(record.kind.dtype, self.b.extract_value(record.code, record.kind.fields.index(node.attr)))

    def on_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return Value(_TRUTH, self.b.not_(self.truth(node.operand)))
        value = self.value(node.operand)
        if not isinstance(node.op, ast.USub):
            self.refuse(node)
        if not isinstance(value, Value):
            return -value
        if isinstance(value.kind, types.Float):
            return Value(value.kind, self.b.fneg(value.code))
        return Value(_INT, self.b.neg(self.number(value, _INT)))

    def on_BinOp(self, node: ast.BinOp) -> Any:
        left, right, op = self.value(node.left), self.value(node.right), type(node.op)
        if not isinstance(left, Value) and not isinstance(right, Value) and op in _PYTHON:
            return _PYTHON[op](left, right)
        kind = _common(self.kind(left), self.kind(right))
        x, y = self.number(left, kind), self.number(right, kind)
        names = _REALS if isinstance(kind, types.Float) else _WHOLE
        if op in names:
            return Value(kind, getattr(self.b, names[op])(x, y))
        if op is ast.RShift and kind is _INT:
            return Value(kind, self.b.ashr(x, y))
        if op in (ast.FloorDiv, ast.Mod) and kind is _INT:
            return Value(kind, self.divide(x, y, op is ast.Mod))
        self.refuse(node)

    def divide(self, x: Any, y: Any, is_rest: bool) -> Any:
        """x // y or x % y of whole numbers, rounded down; y is not 0."""
        rest, zero = self.b.srem(x, y), ir.IntType(64)(0)
        is_above = self.b.and_(
            self.b.icmp_signed("!=", rest, zero), self.b.icmp_signed("<", self.b.xor(rest, y), zero)
        )
        if is_rest:
            return self.b.add(rest, self.b.select(is_above, y, zero))
        return self.b.sub(self.b.sdiv(x, y), self.b.zext(is_above, ir.IntType(64)))

    def on_Compare(self, node: ast.Compare) -> Value:
        if len(node.ops) != 1 or type(node.ops[0]) not in _ORDERS:
            self.refuse(node)
        return self.compare(self.value(node.left), _ORDERS[type(node.ops[0])], self.value(node.comparators[0]))

    def compare(self, left: Any, order: str, right: Any) -> Value:
        kind = _common(self.kind(left), self.kind(right))
        x, y = self.number(left, kind), self.number(right, kind)
        if isinstance(kind, types.Float):  # != holds of NaN, the others do not
            return Value(_TRUTH, (self.b.fcmp_unordered if order == "!=" else self.b.fcmp_ordered)(order, x, y))
        return Value(_TRUTH, (self.b.icmp_signed if _is_signed(kind) else self.b.icmp_unsigned)(order, x, y))

    def on_BoolOp(self, node: ast.BoolOp) -> Value:
        found = cgutils.alloca_once(self.b, ir.IntType(1))
        end = self.b.append_basic_block("decided")
        for i, part in enumerate(node.values):
            truth = self.truth(part)
            self.b.store(truth, found)
            if i + 1 == len(node.values):
                self.b.branch(end)
                break
            following = self.b.append_basic_block("undecided")
            self.b.cbranch(truth, *((following, end) if isinstance(node.op, ast.And) else (end, following)))
            self.b.position_at_end(following)
        self.b.position_at_end(end)
        return Value(_TRUTH, self.b.load(found))

    def on_IfExp(self, node: ast.IfExp) -> Any:
        with self.b.if_else(self.truth(node.test)) as (then, otherwise):
            with then:
                left, left_end = self.value(node.body), self.b.block
            with otherwise:
                right, right_end = self.value(node.orelse), self.b.block
        pairs = list(zip(left, right, strict=True)) if type(left) is type(right) is tuple else [(left, right)]
        joined = []
        for x, y in pairs:
            kind = _common(self.kind(x), self.kind(y)) if self.kind(x) is not self.kind(y) else self.kind(x)
            cell = Cell(kind, cgutils.alloca_once(self.b, _kind_of(kind)))
            for side, end in ((x, left_end), (y, right_end)):
                with self.b.goto_block(end):
                    self.b.store(self.number(side, kind), cell.at)
            joined.append(self.read(cell))
        return tuple(joined) if type(left) is tuple else joined[0]

    # --- Calls --------------------------------------------------------------------------------------------------------

    def on_Call(self, node: ast.Call) -> Any:
        given: list[Any] = []
        for x in node.args:
            if isinstance(x, ast.Starred):
                given += self.value(x.value)
            else:
                given.append(self.value(x))
        called = self.named(node.func)
        if called in _NUMBERS:
            return Value(_NUMBERS[called], self.number(given[0], _NUMBERS[called]))
        if called in (min, max) and len(given) == 2:
            return self.extreme("<" if called is min else ">", *given)
        if called is abs and isinstance(self.kind(given[0]), types.Float):
            code = given[0].code
            return Value(given[0].kind, self.b.call(self.b.module.declare_intrinsic("llvm.fabs", [code.type]), [code]))
        primitive = getattr(called, "written", None)
        if primitive is not None:
            values = [self.number(x, kind) for x, kind in zip(given, primitive.arguments, strict=True)]
            return Value(primitive.result, primitive.emit(self.b, *values))
        if isinstance(called, FunctionType):
            return write(self.b, called, given)
        self.refuse(node)

    def named(self, node: ast.expr) -> Any:
        """What a name stands for outside of the function: `min`, `np.float32`, `put_float`."""
        if isinstance(node, ast.Attribute):
            return getattr(self.named(node.value), node.attr)
        if not isinstance(node, ast.Name):
            self.refuse(node)
        found = self.function.__globals__  # type: ignore[attr-defined]
        return found[node.id] if node.id in found else getattr(found["__builtins__"], node.id, None) or found[
            "__builtins__"
        ].get(node.id)

    def extreme(self, order: str, left: Any, right: Any) -> Value:
        """min or max: the second only if it is smaller, or larger."""
        kind = _common(self.kind(left), self.kind(right))
        x, y = self.number(left, kind), self.number(right, kind)
        return Value(kind, self.b.select(self.compare(Value(kind, y), order, Value(kind, x)).code, y, x))
