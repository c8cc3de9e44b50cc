"""Traces a network and writes it as an ONNX file, after it was run on the example and compared.

The batch size (first size of every tensor) is left dynamic if the network allows it, and so is the length of token
sequences (batch x tokens). All other sizes are those of the example.

Without zeros, a weight needs its bytes and eight more for its position, so a float32 tensor gets smaller below a third.
onnxruntime fills the zeros in when it loads the file: same results, same time. Other programs may not read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.extras import needed_for
from sipp.files import write_atomic
from sipp.native import pytree, quiet_export
from sipp.runtime.examples import Call, cloned, output_difference
from sipp.runtime.exported import Exported

AGREEMENT = 1e-4  # relative to the largest value of an output
POSITION_BYTES = 8  # int64, as ONNX asks


def write_onnx(model: nn.Module, call: Call, path: Path, sparse: bool) -> Exported:
    """Writes the network as ONNX, compared with torch by running the example in onnxruntime."""
    with needed_for("exporting to ONNX"):
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    program = _trace(model, call)
    with quiet_export():
        try:
            names = _output_names(model, call)
            exported = torch.onnx.export(program, dynamo=True, verbose=False, output_names=names)
            proto = exported.model_proto  # type: ignore[union-attr]
            n_sparse = _leave_out_zeros(proto.graph) if sparse else 0
            content = proto.SerializeToString()
        except Exception as error:  # its many passes raise anything
            raise ModelError(
                f"torch.onnx cannot convert it ({_reason(error)})",
                fix="an ONNX file cannot exceed 2 GB, and not every operation has a form in it",
            ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors

    def by_onnxruntime(own: Call) -> list[Any]:
        tensors = [value for value in pytree.tree_leaves(own) if isinstance(value, Tensor)]
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            names = [slot.name for slot in session.get_inputs()]
            return [torch.from_numpy(out) for out in session.run(None, {n: x.numpy() for n, x in zip(names, tensors)})]
        except Exception as error:  # a dtype or operation that it does not implement
            raise ModelError(
                f"onnxruntime cannot run it on the CPU ({_reason(error)})", fix=_suggestion(model)
            ) from error

    off_by = _compare(model, call, by_onnxruntime, "onnxruntime")
    write_atomic(path, content)
    return Exported(path, "onnx", len(content), off_by, *_input_sizes(program, call), n_sparse=n_sparse)


def _leave_out_zeros(graph: Any) -> int:
    """Stores tensors of an ONNX graph as values and positions where that is smaller; returns how many these are."""
    from onnx import helper, numpy_helper

    n_sparse = 0
    for tensor in [*graph.initializer]:
        values = numpy_helper.to_array(tensor)
        positions = np.flatnonzero(values)
        is_smaller = (POSITION_BYTES + values.itemsize) * len(positions) < values.nbytes
        if values.dtype.kind != "f" or not values.ndim or not is_smaller:
            continue
        kept = numpy_helper.from_array(values.reshape(-1)[positions], tensor.name)
        where = numpy_helper.from_array(positions.astype(np.int64))
        graph.sparse_initializer.append(helper.make_sparse_tensor(kept, where, values.shape))
        graph.initializer.remove(tensor)
        n_sparse += 1
    return n_sparse


def _input_sizes(program: torch.export.ExportedProgram, call: Call) -> tuple[int | None, int | None, bool]:
    """The only batch size and sequence length that a program takes (None: any), and whether it takes tokens."""
    has_tokens = any(_is_tokens(value) for value in pytree.tree_leaves(call))
    return _only_size(program, 0), _only_size(program, 1) if has_tokens else None, has_tokens


def _is_tokens(value: Any) -> bool:
    """Whether it holds token ids or their mask: batch x tokens, integers."""
    return isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()


def _dynamic_sizes(value: Any) -> dict[int, Any] | None:
    """The dimensions of an input to leave dynamic; not those of size 1, which torch would specialise."""
    if not isinstance(value, Tensor) or not value.ndim:
        return None
    axes = (0, 1) if _is_tokens(value) else (0,)
    return {axis: torch.export.Dim.AUTO for axis in axes if value.shape[axis] > 1} or None


def _output_names(model: nn.Module, call: Call) -> list[str] | None:
    """The names of the outputs if the model returns a mapping, else None."""
    args, kwargs = cloned(*call)
    with torch.no_grad():
        outputs = model(*args, **kwargs)
    if not isinstance(outputs, Mapping) or not all(isinstance(value, Tensor) for value in outputs.values()):
        return None
    return [str(name) for name in outputs]


def _trace(model: nn.Module, call: Call) -> torch.export.ExportedProgram:
    """Exports the network with a dynamic batch size, if torch finds that nothing depends on it."""
    args, kwargs = call
    open_args, open_kwargs = pytree.tree_map(_dynamic_sizes, call)
    with quiet_export():
        try:
            shapes = signature(model.forward).bind(*open_args, **open_kwargs).arguments  # by name: it may take *args
            return torch.export.export(model, args, kwargs, dynamic_shapes=dict(shapes))
        except Exception as error:  # whatever their forward does, or torch.export has no rule for
            raise ModelError(
                f"torch.export cannot trace it ({_reason(error)})",
                fix="write the weights: torch.save(model.state_dict(), path), or a Hugging Face folder",
            ) from error


def _only_size(program: torch.export.ExportedProgram, axis: int) -> int | None:
    """The only input size along this axis that a program accepts; None: it is dynamic."""
    names = set(program.graph_signature.user_inputs)
    values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
    sizes = [value.shape[axis] for value in values if isinstance(value, Tensor) and value.ndim > axis]
    return next((int(size) for size in sizes if isinstance(size, int)), None)


def _compare(model: nn.Module, call: Call, run: Callable[[Call], list[Any]], what: str) -> float:
    """The largest relative difference of an output; ModelError if that is too large."""
    own, others = cloned(*call), cloned(*call)  # a network may write to its input
    with torch.no_grad():
        expected = [value for value in pytree.tree_leaves(model(*own[0], **own[1])) if isinstance(value, Tensor)]
        worst = output_difference([value for value in run(others) if isinstance(value, Tensor)], expected)
    if not worst <= AGREEMENT:
        raise ModelError(
            f"{what} differs from the network by {worst:.1e} on the example, more than {AGREEMENT:.0e}",
            fix="check that its outputs there are finite, and the same in every call",
        )
    return worst


def _suggestion(model: nn.Module) -> str:
    """What to do if onnxruntime cannot run a network."""
    dtypes = {tensor.dtype for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    narrow = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes - {torch.float32, torch.float64})
    if not narrow:
        return "run it by torch, or by sipp.sparse"
    return f"its numbers are {', '.join(narrow)}: export model.float() with an example in float32"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:300]
