"""A plan: the steps that run a traced network for inputs of certain shapes, on the CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from sipp.runtime.graph import CONV, LINEAR, Graph, Op, Ref
from sipp.runtime.recurrent import LSTM, recurrent_reads
from sipp.runtime.steps import Step, Values, torch_step


@dataclass(frozen=True)
class Plan:
    """The steps of a network, one for each operation, and the constants that they read from the values."""

    graph: Graph  # without constants
    steps: list[Step]
    constants: Values

    def run(self, inputs: list[Any]) -> list[Any]:
        """The flat outputs, which may share memory with inputs, constants and buffers."""
        values = self.constants | dict(zip(self.graph.inputs, inputs))
        for step in self.steps:
            step.run(values)
        return [values[ref.value] if isinstance(ref, Ref) else ref for ref in self.graph.outputs]


def plan_of(graph: Graph, steps: list[Step]) -> Plan:
    """The plan of these steps; weights that they hold themselves are not kept a second time."""
    used = {n for op, step in zip(graph.ops, steps) for n in _still_read(op, step)}
    used |= {ref.value for ref in graph.outputs if isinstance(ref, Ref)}
    constants = {n: value for n, value in graph.constants.items() if n in used}
    return Plan(replace(graph, constants={}), steps, constants)


def _still_read(op: Op, step: Step) -> list[int]:
    """The values that a step reads in later calls."""
    if step.holds_weights and op.target in (CONV, LINEAR):
        return [op.args[0].value] if op.addend is None else [op.args[0].value, op.addend]
    if step.holds_weights and op.target is LSTM:
        return recurrent_reads(op)
    return op.reads()


def fold_constants(graph: Graph) -> Graph:
    """Evaluates operations on constants alone, except random ones, and makes their results constants."""
    constants, ops = dict(graph.constants), []
    for op in graph.ops:
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())
        if not is_drawn and op.target not in (CONV, LINEAR) and all(n in constants for n in op.reads()):
            torch_step(op).run(constants)
        else:
            ops.append(op)
    return replace(graph, ops=ops, constants=constants)
