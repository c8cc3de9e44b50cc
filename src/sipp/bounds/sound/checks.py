"""A traced network run node by node: each operation must compute what its name says (T12, T13).

No graph shows that a function or a method was replaced, that an argument means something else or that a BatchNorm
stayed in train mode. The values do: each is compared with the formula of the operation that it counts as.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from sipp.bounds.sound.calls import METADATA, MOVEMENTS, NoBound, Pair, module_of, named_options, op_name, spelling
from sipp.bounds.sound.references import reference
from sipp.bounds.sound.tracing import close

ROUNDING = 1e-14  # of float64, where the terms of a sum are larger than the sum
OTHERWISE = "it does not compute what its name says"


def check_operations(root: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs the graph on these arguments; raises NoBound at the first operation that does something else than its name.

    What does not depend on the arguments is a constant, whatever it is computed by, and is left alone.
    """
    values: dict[fx.Node, Any] = {}
    flows: set[fx.Node] = set()
    given = iter(args)
    with torch.no_grad():
        for node in root.graph.nodes:
            if node.op == "placeholder":
                name = str(node.target)
                found = kwargs[name] if name in kwargs else next(given, node.args[0] if node.args else None)
                values[node] = found.clone() if isinstance(found, Tensor) else found
                if isinstance(found, Tensor):
                    flows.add(node)
            elif node.op == "get_attr":
                values[node] = _attribute(root, str(node.target))
            elif node.op != "output":
                values[node] = _checked(node, root, values, flows)
                op = op_name(node, root)
                asked = op in METADATA or (op == "getattr" and node.args[1] in METADATA)
                if not asked and any(source in flows for source in node.all_input_nodes):
                    flows.add(node)


def _checked(node: fx.Node, root: fx.GraphModule, values: Mapping[fx.Node, Any], flows: set[fx.Node]) -> Any:
    """The value of a node, compared with its formula where it depends on the network's input."""
    op = op_name(node, root)
    arguments: Any = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    # The formula sees the values as they were: the operation may work in place.
    before: Any = map_aggregate(arguments, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
    value = _run(node, root, *arguments)
    asked = op in METADATA or (op == "getattr" and node.args[1] in METADATA)
    piece = op == "getitem" and isinstance(arguments[0][0], (tuple, list, torch.Size))
    if asked or piece or not any(source in flows for source in node.all_input_nodes):
        return value
    try:
        if op in MOVEMENTS:
            _check_movement(node, root, before, flows, value)
        else:
            options = named_options(node, root, root, *before)
            plain = {key: option.dense if isinstance(option, Pair) else option for key, option in options.items()}
            expected = reference(op, plain, value.shape[2:] if isinstance(value, Tensor) else ())
            _compare(expected, value, ROUNDING * _size(plain.values()))
    except NoBound as why:
        text = f" ({why})" if str(why) else ""
        raise NoBound(f"op {spelling(node, root)} in module {module_of(node)}{text}") from None
    return value


def _size(options: Iterable[Any]) -> float:
    """The product of the largest magnitudes of the arguments, those below 1 left out: where sums cancel, it shows."""
    peaks = [float(t.abs().max()) for t in options if isinstance(t, Tensor) and t.numel() and t.is_floating_point()]
    return math.prod(max(1.0, peak) for peak in peaks if math.isfinite(peak))


def _compare(expected: Any, value: Any, rounding: float) -> None:
    """Raises NoBound where a value is not what the formula gives, for the samples that it was computed for."""
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor) or value.dtype != expected.dtype:
        raise NoBound(OTHERWISE)
    few = value[: expected.shape[0]] if expected.dim() and value.dim() else value
    if not close(few, expected) and not torch.allclose(few, expected, rtol=0.0, atol=rounding, equal_nan=True):
        raise NoBound(OTHERWISE)


def _check_movement(node: fx.Node, root: fx.GraphModule, before: Any, flows: set[fx.Node], value: Any) -> None:
    """Raises NoBound unless an operation moves the values to where it moves their numbers, and fills in constants."""
    moved_from = before[0][0] if before[0] else before[1].get("input")
    if not isinstance(moved_from, Tensor) or not node.args or node.args[0] not in flows:
        raise NoBound("its first argument is not a network value")
    numbers = torch.arange(1, moved_from.numel() + 1, dtype=torch.float64, device=moved_from.device)
    numbers = numbers.reshape(moved_from.shape)
    runs = [_run(node, root, (other, *before[0][1:]), before[1]) for other in (numbers, torch.zeros_like(numbers))]
    pieces = zip(*runs, value) if isinstance(value, (tuple, list)) else [(*runs, value)]
    flat = moved_from.reshape(-1)
    for moved, fill, after in pieces:
        number = (moved - fill).nan_to_num().long()
        if bool((number > flat.numel()).any()) or bool((number < 0).any()):
            raise NoBound(OTHERWISE)
        if flat.numel():
            fill = torch.where(number > 0, flat[(number - 1).clamp(min=0)], fill.to(flat.dtype))
        if after.shape != fill.shape or not torch.equal(after.nan_to_num(), fill.to(after.dtype).nan_to_num()):
            raise NoBound(OTHERWISE)


def _run(node: fx.Node, root: fx.GraphModule, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _attribute(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part)
    return root
