"""Numbers in LLVM code: what kind they are, how kinds meet, arithmetic and comparisons, each as Numba has it.

A number that is known before the code runs is one of Python's; every other is a `Value`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

INT, REAL, TRUTH = types.int64, types.float64, types.boolean
I64 = ir.IntType(64)


class Value(NamedTuple):
    """A number, or a record of whole numbers, that the code computes."""

    kind: Any  # Numba's type
    code: Any  # LLVM's value


class Primitive(NamedTuple):
    """A function in LLVM instructions: the kinds of its result and arguments, and emit(builder, *values)."""

    result: Any
    arguments: tuple[Any, ...]
    emit: Callable[..., Any]


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
        made: Any = intrinsic(typed)  # for Numba's compiler
        made.written = Primitive(result, arguments, emit)  # for ours (`writing.py`)
        return made

    return wrap


def is_number(value: Any) -> bool:
    return not isinstance(value, tuple) or (
        isinstance(value, Value) and isinstance(value.kind, types.Number | types.Boolean)
    )


def kind_of(value: Any) -> Any:
    return value.kind if isinstance(value, Value) else {bool: TRUTH, int: INT, float: REAL}[type(value)]


def is_real(kind: Any) -> bool:
    return isinstance(kind, types.Float)


def _is_signed(kind: Any) -> bool:
    return bool(kind is not TRUTH and kind.signed)


def in_llvm(kind: Any) -> Any:
    """LLVM's type for a kind of numbers."""
    if is_real(kind):
        return ir.FloatType() if kind.bitwidth == 32 else ir.DoubleType()
    return ir.IntType(1 if kind is TRUTH else kind.bitwidth)


def common(left: Any, right: Any) -> Any:
    """The kind that numbers of two kinds are joined in: whole numbers in 64 bits, mixed ones in float64."""
    if left is right and (left is TRUTH or is_real(left)):
        return left
    if is_real(left) or is_real(right):
        return REAL
    return INT if _is_signed(left) or _is_signed(right) else types.uint64


def as_kind(b: Any, value: Any, kind: Any) -> Any:
    """LLVM's value of a number, turned into this kind; no real number becomes a whole one unsaid."""
    held, target = kind_of(value), in_llvm(kind)
    code = value.code if isinstance(value, Value) else in_llvm(held)(value)
    if held is kind:
        return code
    if is_real(held):
        if not is_real(kind):
            raise TypeError(f"a {held} cannot be a {kind}")
        return b.fptrunc(code, target) if kind.bitwidth < held.bitwidth else b.fpext(code, target)
    if is_real(kind):
        return b.sitofp(code, target) if _is_signed(held) else b.uitofp(code, target)
    if target.width <= code.type.width:
        return code if target.width == code.type.width else b.trunc(code, target)
    return b.sext(code, target) if _is_signed(held) else b.zext(code, target)


_BITS = {ast.BitAnd: "and_", ast.BitOr: "or_"}
_WHOLE = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.LShift: "shl", **_BITS}
_REALS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}


def arithmetic(b: Any, left: Any, operation: type[ast.operator], right: Any) -> Value | None:
    """left operation right; None where there is no such operation on these kinds."""
    kind = common(kind_of(left), kind_of(right))
    x, y = as_kind(b, left, kind), as_kind(b, right, kind)
    names = _REALS if is_real(kind) else _BITS if kind is TRUTH else _WHOLE
    if operation in names:
        return Value(kind, getattr(b, names[operation])(x, y))
    if operation is ast.RShift and kind is INT:
        return Value(kind, b.ashr(x, y))
    if operation in (ast.FloorDiv, ast.Mod) and kind is INT:
        return Value(kind, _divide(b, x, y, operation is ast.Mod))
    return None


def _divide(b: Any, x: Any, y: Any, is_rest: bool) -> Any:
    """x // y or x % y of whole numbers, rounded down; 0 where y is 0."""
    zero = b.icmp_signed("==", y, I64(0))
    y = b.select(zero, I64(1), y)
    rest = b.srem(x, y)
    is_above = b.and_(b.icmp_signed("!=", rest, I64(0)), b.icmp_signed("<", b.xor(rest, y), I64(0)))
    if is_rest:
        found = b.add(rest, b.select(is_above, y, I64(0)))
    else:
        found = b.sub(b.sdiv(x, y), b.zext(is_above, I64))
    return b.select(zero, I64(0), found)


def compare(b: Any, left: Any, order: str, right: Any) -> Value:
    """Whether left < right, or what `order` says."""
    kind = common(kind_of(left), kind_of(right))
    x, y = as_kind(b, left, kind), as_kind(b, right, kind)
    if is_real(kind):  # of NaN only != holds
        return Value(TRUTH, (b.fcmp_unordered if order == "!=" else b.fcmp_ordered)(order, x, y))
    return Value(TRUTH, (b.icmp_signed if _is_signed(kind) else b.icmp_unsigned)(order, x, y))


def truth(b: Any, value: Any) -> Any:
    """LLVM's bit of a condition: a whole number holds where it is not 0."""
    if kind_of(value) is TRUTH:
        return as_kind(b, value, TRUTH)
    return b.icmp_signed("!=", as_kind(b, value, INT), I64(0))


def extreme(b: Any, order: str, left: Any, right: Any) -> Value:
    """min ("<") or max (">"): the second only if it is smaller or larger, as Python has it."""
    kind = common(kind_of(left), kind_of(right))
    x, y = as_kind(b, left, kind), as_kind(b, right, kind)
    return Value(kind, b.select(compare(b, Value(kind, y), order, Value(kind, x)).code, y, x))


def magnitude(b: Any, value: Value) -> Value:
    """|x| of a real number."""
    kind = in_llvm(value.kind)
    return Value(value.kind, b.call(b.module.declare_intrinsic("llvm.fabs", [kind]), [value.code]))
