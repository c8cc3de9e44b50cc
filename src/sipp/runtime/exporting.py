"""`export`: writes a network, zeros included, so that other programs read it.

    NAME.onnx   the network itself, traced on an example
    a folder    a Hugging Face folder that `from_pretrained` of the model's class loads (hugging_face_folder.py)

What is written is read back and compared first: weights bit by bit, an ONNX file by running the example.

The batch size of an ONNX file (first size of every tensor) is left dynamic if the network allows it, and so is the
length of token sequences (batch x tokens). All other sizes are those of the example. Without zeros, a weight needs its
bytes and eight more for its position, so a float32 tensor gets smaller below a third. onnxruntime fills the zeros in
when it loads the file: same results, same time. Other programs may not read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.extras import needed_for
from sipp.files import write_atomic
from sipp.inputs import ONE_AT_A_TIME, turn_off_caches
from sipp.native import pytree, quiet_export
from sipp.results import (
    AnyCertificate,
    NetworkLike,
    Pruned,
    PrunedTo,
    certificate_of,
    check,
    hashing,
    network_of,
    shown,
)
from sipp.runtime.copying import plain_copy
from sipp.runtime.examples import AGREEMENT, Call, call_of, cloned, output_difference, try_example
from sipp.runtime.graph import reason_of
from sipp.runtime.hugging_face_folder import model_card, write_folder

Rounding = Literal["same", "bf16", "fp16"]
SHARD = "50GB"  # default size of the largest file of weights, as in transformers
ONNX = ".onnx"
WITH_EXAMPLE = f'write sipp.export(pruned, "net{ONNX}", example)'
POSITION_BYTES = 8  # int64, as ONNX asks
OF_TORCH = {  # what a reader may expect here, and the line of torch that writes it
    ".pt": "torch.save(pruned.model.state_dict(), path)",
    ".pth": "torch.save(pruned.model.state_dict(), path)",
    ".pt2": "torch.export.save(torch.export.export(pruned.model, (example,)), path)",
    ".safetensors": "safetensors.torch.save_file(pruned.model.state_dict(), path), or sipp.save for a small file",
}


@dataclass(frozen=True)
@shown
class Exported:
    """What was written, and how much it differs from the network when read back. `print` it."""

    path: Path
    to: Literal["onnx", "hf"]
    n_bytes: int
    off_by: float = 0.0  # largest relative difference of outputs on the example; weights are equal bit by bit
    n_inputs: int | None = None  # the only batch size that an ONNX file takes; None: any
    n_tokens: int | None = None  # the only sequence length; None: any, or no sequences
    has_tokens: bool = False  # it takes sequences of token ids
    beside: tuple[str, ...] = ()  # other files in a Hugging Face folder, such as the tokenizer
    n_sparse: int = 0  # tensors of an ONNX file that are stored without their zeros

    @property
    def sentence(self) -> str:
        """What was written, and what it takes."""
        zeros = f"{self.n_sparse} tensors without their zeros" if self.n_sparse else "zeros included"
        text = f"{self.path}: {self.to}, {self.n_bytes:,} bytes, {zeros}; read back, "
        if self.to == "hf":
            with_it = f"with {', '.join(self.beside)}" if self.beside else "without a tokenizer: none is known"
            return f"{text}every bit is the same; {with_it}"
        inputs = "any number of inputs"
        if self.n_inputs is not None:
            inputs = f"{self.n_inputs} input{'' if self.n_inputs == 1 else 's'} at a time only"
        if self.has_tokens:
            inputs += ", of any length" if self.n_tokens is None else f", of {self.n_tokens} tokens only"
        return text + f"outputs differ by {self.off_by:.0e} on the example; it takes {inputs}; other sizes are fixed"


@torch.inference_mode(False)
def export(
    pruned: NetworkLike,
    path: str | PathLike[str],
    example: Any = None,
    *,
    values: Rounding = "same",
    shard: str | int | None = None,
    tokenizer: Any = None,
    certificate: AnyCertificate | None = None,
    sparse: bool = False,
) -> Exported:
    """Writes the network as an ONNX file (NAME.onnx) or a new Hugging Face folder; returns what was written.

    An ONNX file needs an `example`, an input as for `sipp.sparse`; with two or more inputs in it, the file takes any
    number of them. `sparse=True` leaves its zeros out, where that makes it smaller; not all programs read that. An
    existing file is replaced, a folder with content is refused. The network is not changed.

    For a folder only: `values` rounds the weights to "bf16" or "fp16", `shard` is the size of the largest file of
    weights ("5GB", or bytes), and `tokenizer` is saved with the network. Without one, the tokenizer and other files
    (chat template, preprocessor, licence) are copied from the folder the network was loaded from, if that is known. A
    result of `prune` gets a model card (README.md), with the `certificate` of this network.

    Example:
        >>> import sipp, tempfile, torch
        >>> pruned = sipp.prune(torch.nn.Linear(8, 4), None, keep=0.5, method="magnitude")
        >>> made = sipp.export(pruned, tempfile.mkdtemp() + "/net.onnx", torch.rand(2, 8))
        >>> made.off_by < 1e-5
        True
    """
    model = network_of(pruned)
    target = check.path("path", path, "net.onnx")
    check.choice("values", values, get_args(Rounding))
    check.flag("sparse", sparse)
    if target.suffix in OF_TORCH:
        what = f"path={str(path)!r:.80} is neither NAME{ONNX} nor a Hugging Face folder"
        raise OptionError(what, fix=f"for {target.suffix}, write {OF_TORCH[target.suffix]}", option="path")
    if target.suffix == ONNX:
        if values != "same" or any(given is not None for given in (shard, tokenizer, certificate)):
            what = f"values, shard, tokenizer and certificate are for a folder, not for NAME{ONNX}"
            raise OptionError(what, fix="leave them out")
        return _to_onnx(model, target, example, sparse)
    if sparse:
        raise OptionError("a folder contains all zeros", fix=f"leave sparse out, or write NAME{ONNX}", option="sparse")
    if example is not None:
        raise OptionError("a Hugging Face folder needs no example", fix=WITH_EXAMPLE, option="example")
    own, card = _copy_on_cpu(model), _card(pruned, certificate, target.name, values)
    if values != "same":
        own = own.to({"bf16": torch.bfloat16, "fp16": torch.float16}[values])
    n_bytes, beside = write_folder(own, target, SHARD if shard is None else shard, tokenizer, card)
    return Exported(target, "hf", n_bytes, beside=beside)


def _to_onnx(model: nn.Module, path: Path, example: Any, sparse: bool) -> Exported:
    """Writes an ONNX file, for inputs like the example."""
    if example is None:
        raise OptionError("an ONNX file needs an example", fix=WITH_EXAMPLE, option="example")
    own, call = _copy_on_cpu(model), call_of(example)
    turn_off_caches(own.modules())
    try_example(own, *call)
    with ONE_AT_A_TIME:  # torch.export, which replaces functions of Python while it works
        return _write_onnx(own, call, path, sparse)


def _copy_on_cpu(model: nn.Module) -> nn.Module:
    with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
        return plain_copy(model).to("cpu")


def _card(pruned: NetworkLike, certificate: AnyCertificate | None, name: str, values: str) -> str:
    """The model card; empty if nothing is known but the network."""
    record = pruned.pruned if isinstance(pruned, PrunedTo) else pruned
    known = certificate_of(pruned, certificate)
    if not isinstance(record, Pruned):
        return ""
    if known is not None and known.pruned_hash != hashing.of_model(record.model):
        raise OptionError("the certificate is about another network", fix="certify pruned.model", option="certificate")
    return model_card(record, known, name=name, values=values)


# --- An ONNX file -----------------------------------------------------------------------------------------------------


def _write_onnx(model: nn.Module, call: Call, path: Path, sparse: bool) -> Exported:
    """Writes the network as ONNX, compared with torch by running the example in onnxruntime."""
    with needed_for("exporting to ONNX"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    own_args, own_kwargs = cloned(call)  # a network may write to its input
    with torch.no_grad():
        expected = model(*own_args, **own_kwargs)
    program = _trace(model, call)
    with quiet_export():
        try:
            exported = torch.onnx.export(program, dynamo=True, verbose=False, output_names=_names(expected))
            proto = exported.model_proto  # type: ignore[union-attr]
            n_sparse = _leave_out_zeros(proto.graph) if sparse else 0
            content = proto.SerializeToString()
        except Exception as error:  # its many passes raise anything
            raise ModelError(
                f"torch.onnx cannot convert it ({reason_of(error)})",
                fix="an ONNX file cannot exceed 2 GB, and not every operation has a form in it",
            ) from error
    off_by = output_difference(_by_onnxruntime(content, call), _tensors(expected))
    if not off_by <= AGREEMENT:
        raise ModelError(
            f"onnxruntime differs from the network by {off_by:.1e} on the example, more than {AGREEMENT:.0e}",
            fix="check that its outputs there are finite, and the same in every call",
        )
    write_atomic(path, content)
    return Exported(path, "onnx", len(content), off_by, *_input_sizes(program, call), n_sparse=n_sparse)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _names(outputs: Any) -> list[str] | None:
    """The names of the outputs if the model returns a mapping of tensors."""
    is_named = isinstance(outputs, Mapping) and all(isinstance(value, Tensor) for value in outputs.values())
    return [str(name) for name in outputs] if is_named else None


def _by_onnxruntime(content: bytes, call: Call) -> list[Tensor]:
    """The outputs of an ONNX file for the example."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        named = {slot.name: x.numpy() for slot, x in zip(session.get_inputs(), _tensors(cloned(call)))}
        return [torch.from_numpy(output) for output in session.run(None, named)]
    except Exception as error:  # a dtype or operation that it does not implement
        raise ModelError(
            f"onnxruntime cannot run it on the CPU ({reason_of(error)})",
            fix="for float16 or bfloat16: export model.float() with an example in float32",
        ) from error


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
                f"torch.export cannot trace it ({reason_of(error)})",
                fix="write the weights: torch.save(model.state_dict(), path), or a Hugging Face folder",
            ) from error


def _only_size(program: torch.export.ExportedProgram, axis: int) -> int | None:
    """The only input size along this axis that a program accepts; None: it is dynamic."""
    names = set(program.graph_signature.user_inputs)
    values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
    sizes = [value.shape[axis] for value in values if isinstance(value, Tensor) and value.ndim > axis]
    return next((int(size) for size in sizes if isinstance(size, int)), None)
