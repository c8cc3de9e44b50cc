"""Concatenation and zero padding of images, as copies into a buffer in the runtime's own layout."""

from __future__ import annotations

import torch

from sipp.runtime.buffers import Arena
from sipp.runtime.graph import ATEN, Op, Ref
from sipp.runtime.steps import Step, Values

CAT, PAD = ATEN.cat.default, ATEN.pad.default
CAT_AND_PAD = (CAT, PAD)


def cat_or_pad_step(op: Op, values: Values, arena: Arena, border: tuple[int, int]) -> Step | None:
    """The step for concatenating channels or padding with zeros; None to leave it to torch."""
    layout = _parts(op, values, arena)
    if layout is None:
        return None
    shape, parts = layout
    n, channels, height, width = shape
    out = arena.add_image(n, channels, height, width, border)  # not shared, so the zeros around the parts stay zero
    result = out.inner
    targets = []
    for number, start in parts:
        part = result
        for dim, (first, size) in enumerate(zip(start, values[number].shape)):
            part = part.narrow(dim, first, size)
        targets.append((number, part))

    def run_step(current: Values) -> None:
        for number, part in targets:
            part.copy_(current[number])
        current[op.out] = result

    run_step(values)
    return Step(op.name, "copies", run_step, op.out)


def _parts(op: Op, values: Values, arena: Arena) -> tuple[list[int], list[tuple[int, list[int]]]] | None:
    """The shape of the result, and each part with its start index; None to leave it to torch."""
    refs = op.args[0] if op.target is CAT else [op.args[0]]
    if not all(isinstance(ref, Ref) and values[ref.value].ndim == 4 for ref in refs):
        return None
    numbers = [ref.value for ref in refs]
    if all(arena.buffer_of(values[n]) is None for n in numbers) or any(
        values[n].dtype != torch.float32 for n in numbers
    ):
        return None
    first = values[numbers[0]].shape
    if op.target is CAT:
        dim = op.args[1] if len(op.args) > 1 else 0
        if dim not in (1, -3):
            return None
        starts, total = [], 0
        for n in numbers:
            starts.append((n, [0, total, 0, 0]))
            total += values[n].shape[1]
        return [first[0], total, *first[2:]], starts
    pads = op.args[1]
    mode, value = op.args[2] if len(op.args) > 2 else "constant", op.args[3] if len(op.args) > 3 else None
    if mode != "constant" or value not in (None, 0, 0.0) or any(pad < 0 for pad in pads) or len(pads) > 6:
        return None
    full = [(0, 0)] * (4 - len(pads) // 2) + [(pads[i], pads[i + 1]) for i in range(len(pads) - 2, -1, -2)]
    shape = [size + low + high for size, (low, high) in zip(first, full)]
    return shape, [(numbers[0], [low for low, _ in full])]
