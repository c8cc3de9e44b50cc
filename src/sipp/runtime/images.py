"""Images that are pooled, concatenated or padded with zeros, from buffer to buffer.

Max and average pooling are loops over output positions and the inputs that each one reads. A vector is the points of a
position, or for a single image a few neighbours of a row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sipp.native import machine_code, processor, vector
from sipp.runtime.buffers import Buffer, Work, filled_run, image_buffer
from sipp.runtime.graph import ATEN, Op, Slot
from sipp.runtime.kernel import LONG_SECONDS, Argument, PreparedKernel
from sipp.runtime.products import pair
from sipp.runtime.steps import Step, Values

MAX, AVERAGE, ADAPTIVE = ATEN.max_pool2d.default, ATEN.avg_pool2d.default, ATEN.adaptive_avg_pool2d.default
MEANS = (AVERAGE, ADAPTIVE)
CAT, PAD = ATEN.cat.default, ATEN.pad.default
TABLE_NUMBERS = 4  # per position: its offset in out (bytes), first and last tap, factor of the sum (as bits)


def pool_step(op: Op, work: Work) -> Step | None:
    """The step for a pooling whose input is in a buffer; None to leave it to torch."""
    x = work.input(op)
    source = work.arena.image_of(x)
    windows = None if source is None else _windows(op, x)
    if source is None or windows is None:
        return None
    rows, columns = windows
    if not all(len(taps) for line in windows for taps in line[0]):
        return None
    out = work.arena.image(len(x), x.shape[1], len(rows[0]), len(columns[0]), work.border)
    kernel = _kernel(op.target is MAX, rows, columns, source, out)
    kernel.time_and_set_threads(LONG_SECONDS)
    work.arena.take(out, is_shared=True)
    run_step = filled_run([], kernel, op.out, out.inner)
    if op.target is MAX:
        return Step(op.name, "ours", run_step, op.out, "max of windows", is_watched=True)
    return Step(op.name, "ours", run_step, op.out, "mean of windows")  # its sums may overflow


def copies_step(op: Op, work: Work) -> Step | None:
    """The step for concatenating channels or padding with zeros, as copies; None to leave it to torch."""
    refs = op.args[0] if op.target is CAT else op.args[:1]
    parts = [work.values[ref.value] for ref in refs if isinstance(ref, Slot)]
    is_float = all(x.ndim == 4 and x.dtype == torch.float32 for x in parts)
    if len(parts) < len(refs) or not is_float or all(work.arena.buffer_of(x) is None for x in parts):
        return None
    (n, channels, height, width), starts = parts[0].shape, [(0, 0, 0)]
    if op.target is CAT:
        if op.args[1:] not in ((1,), (-3,)):
            return None
        for x in parts:
            starts.append((starts[-1][0] + x.shape[1], 0, 0))
        channels = starts[-1][0]
    else:
        pads = [*op.args[1], *(0,) * 6]
        if any(pads[6:]) or min(pads) < 0 or op.args[2:] not in ((), ("constant",), ("constant", 0.0)):
            return None
        left, right, top, bottom, front, back = pads[:6]
        channels, height, width = channels + front + back, height + top + bottom, width + left + right
        starts = [(front, top, left)]
    out = work.arena.take(image_buffer(n, channels, height, width, work.border))  # not shared: the zeros have to stay
    targets = [
        (ref.value, out.inner[:, c : c + x.shape[1], h : h + x.shape[2], w : w + x.shape[3]])
        for ref, x, (c, h, w) in zip(refs, parts, starts)
    ]

    def run_step(current: Values) -> None:
        for number, target in targets:
            target.copy_(current[number])
        current[op.out] = out.inner

    return Step(op.name, "ours", run_step, op.out, "copies", is_watched=True)


# --- Pooling ----------------------------------------------------------------------------------------------------------


_Windows = tuple[list[range], list[int]]  # per output row (or column): the input rows, and how many count


def _windows(op: Op, x: Tensor) -> tuple[_Windows, _Windows] | None:
    height, width = x.shape[2:]
    if op.target is ADAPTIVE:
        size = op.args[1]
        windows = [_adaptive(n, m) for n, m in zip((height, width), size)]
        return windows[0], windows[1]
    args = [*op.args[1:], *[None] * 6][:6]
    kernel = pair(args[0])
    stride, padding = pair(args[1] or kernel), pair(args[2] or 0)
    if op.target is MAX:
        dilation, ceil, counts_padding = pair(args[3] or 1), bool(args[4]), True
    else:
        if args[5] is not None:
            return None
        dilation, ceil, counts_padding = (1, 1), bool(args[3]), args[4] is None or bool(args[4])
    if ceil:
        return None
    windows = [_sliding(*axis, counts_padding) for axis in zip((height, width), kernel, stride, padding, dilation)]
    return windows[0], windows[1]


def _sliding(n: int, kernel: int, stride: int, padding: int, dilation: int, counts_padding: bool) -> _Windows:
    n_out = (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    taps = []
    for i in range(n_out):
        start = i * stride - padding
        first = start % dilation if start < 0 else start
        taps.append(range(first, min(n, start + dilation * (kernel - 1) + 1), dilation))
    return taps, [kernel if counts_padding else len(line) for line in taps]


def _adaptive(n: int, n_out: int) -> _Windows:
    taps = [range(i * n // n_out, -(-(i + 1) * n // n_out)) for i in range(n_out)]
    return taps, [len(line) for line in taps]


def _kernel(is_max: bool, rows: _Windows, columns: _Windows, source: Buffer, out: Buffer) -> PreparedKernel:
    channels, out_high, out_wide, _ = out.data_CHWN.shape
    _, x_high, x_wide, n = source.data_CHWN.shape
    pixel = vector.FLOAT_BYTES * n
    together, step = _columns_together(columns[0]) if n == 1 else (1, 1)
    (row_taps, n_rows), (column_taps, n_columns) = rows, (columns[0][::together], columns[1][::together])
    lines = [(np.array(taps, np.int64) + source.border[0]) * x_wide for taps in row_taps]
    across = [np.array(taps, np.int64) + source.border[1] for taps in column_taps]
    taps = [pixel * np.add.outer(line, pixels).ravel() for line in lines for pixels in across]
    n_taps = np.array([len(each) for each in taps], np.int64)
    out_lines = (np.arange(len(lines), dtype=np.int64) + out.border[0]) * out_wide
    out_columns = np.arange(len(across), dtype=np.int64) * together + out.border[1]
    places = pixel * np.add.outer(out_lines, out_columns).ravel()
    factors = (1.0 / np.multiply.outer(n_rows, n_columns)).astype(np.float32).ravel().view(np.int32)
    table = np.stack((places, n_taps.cumsum() - n_taps, n_taps.cumsum(), factors), 1)
    arguments: dict[str, Argument] = {
        "x": source.data_CHWN,
        "x_pitch": vector.FLOAT_BYTES * x_high * x_wide * n,
        "out": out.data_CHWN,
        "out_pitch": vector.FLOAT_BYTES * out_high * out_wide * n,
        "table": table.astype(np.int64),  # TABLE_NUMBERS for each position
        "taps": np.concatenate(taps),
        "n_positions": len(taps),
        "n_channels": channels,
        "n_points": n,
    }
    lanes = next((size for size in (processor.LANES, 8) if n % size == 0), together)
    key = ("pooling", is_max, lanes, step)
    return PreparedKernel(key, arguments, channels, lambda b, args: _emit(b, args, lanes, is_max, step))


def _columns_together(taps: list[range]) -> tuple[int, int]:
    """How many columns of one image fit into a vector, and how far apart they read; one if they are not alike."""
    steps = {later.start - first.start for first, later in pairwise(taps)}
    if len({(len(line), line.step) for line in taps}) > 1 or steps not in ({1}, {2}):
        return 1, 1
    lanes = next((n for n in (processor.LANES, 8, 4) if len(taps) % n == 0), 1)
    return lanes, steps.pop() if lanes > 1 else 1


def _emit(b: Any, args: machine_code.Arguments, lanes: int, is_max: bool, step: int) -> None:
    with vector.each(b, *args.share(args.number("n_channels"))) as channel:
        x = b.add(args.number("x"), b.mul(channel, args.number("x_pitch")))
        out = b.add(args.number("out"), b.mul(channel, args.number("out_pitch")))
        with vector.each(b, 0, args.number("n_positions")) as position:
            entry = vector.address_of(b, args.number("table"), position, vector.LONG_BYTES * TABLE_NUMBERS)
            numbers = [vector.load(b, entry, vector.I64, vector.LONG_BYTES * i) for i in range(TABLE_NUMBERS)]
            to, start, stop, bits = numbers
            to, factor = b.add(out, to), vector.splat(b, b.bitcast(b.trunc(bits, vector.I32), vector.F32), lanes)
            with vector.each(b, 0, args.number("n_points"), lanes) as point:
                value = _over_taps(b, args, lanes, is_max, step, vector.address_of(b, x, point), start, stop)
                vector.store(b, value if is_max else b.fmul(value, factor), vector.address_of(b, to, point))


def _over_taps(
    b: Any, args: machine_code.Arguments, lanes: int, is_max: bool, step: int, x: Any, start: Any, stop: Any
) -> Any:
    taps, kind = args.number("taps"), vector.of(lanes)
    (cell,) = vector.variables(b, [vector.constant(float("-inf") if is_max else 0.0, lanes)])
    with vector.each(b, start, stop) as tap:
        place = b.add(x, vector.item(b, taps, tap, vector.I64))
        value, have = vector.load(b, place, kind), b.load(cell)
        if step == 2:  # every second number of two vectors
            value = vector.pick(
                b, value, vector.load(b, place, kind, lanes * vector.FLOAT_BYTES), list(range(0, 2 * lanes, 2))
            )
        if is_max:
            is_new = b.or_(b.fcmp_ordered(">", value, have), b.fcmp_unordered("uno", value, value))  # NaN stays
            b.store(b.select(is_new, value, have), cell)
        else:
            b.store(b.fadd(value, have), cell)
    return b.load(cell)
