"""`export(model, path, to=...)`: writes a network, zeros included, as a file that other programs read.

    safetensors, pt   every tensor of the state_dict, dense
    pt2, onnx         the network itself, traced on an example (programs.py)
    hf                a folder that `from_pretrained` of the model's class loads

Everything is read back and compared before it is written: weights bit by bit, programs by running the example.
"""

from __future__ import annotations

import io
import shutil
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.files import new_folder, write_atomic
from sipp.inputs.restore import ONE_AT_A_TIME, turn_off_caches
from sipp.results.checking import check_choice, check_path, check_size
from sipp.results.network_hash import raw_bytes
from sipp.results.pruned_to import NetworkLike, network_of
from sipp.runtime.examples import call_of, try_example, without_aliases
from sipp.runtime.exported import TRACED, Exported, Target
from sipp.runtime.plain_copy import plain_copy
from sipp.runtime.programs import write_onnx, write_program
from sipp.storage.block_by_block.sharded_weights import companion_files
from sipp.storage.tensors import in_own_memory, tensors_to_bytes

Values = Literal["same", "bf16", "fp16"]
SHARD = "50GB"  # default size of the largest file of weights, as in transformers
MARK = {"format": "pt"}  # metadata that tells readers of safetensors that these are torch tensors


@torch.inference_mode(False)
def export(
    model: NetworkLike,
    path: str | PathLike[str],
    *,
    to: Target,
    example: Any = None,
    values: Values = "same",
    shard: str | int = SHARD,
    tokenizer: Any = None,
) -> Exported:
    """Writes the network to a file (with "hf", to a new folder), and returns what was written.

    `example` is an input as for `sipp.sparse`; "pt2" and "onnx" need one, with a batch of two or more if the file is
    to take any batch size. An existing file is replaced atomically; a folder with content is refused. The model is not
    changed.

    For "hf" only: `values` rounds the weights to "bf16" or "fp16", `shard` is the size of the largest file of weights
    ("5GB", or bytes), and `tokenizer` is saved with the model. Without one, the tokenizer and other files (chat
    template, preprocessor, licence) are copied from the folder that the model was loaded from, if that is known.

    Example:
        >>> import sipp, tempfile, torch
        >>> from sipp.runtime.exporting import export
        >>> pruned = sipp.prune(torch.nn.Linear(8, 4), None, keep=0.5, method="magnitude")
        >>> made = export(pruned.model, tempfile.mkdtemp() + "/net.pt2", to="pt2", example=torch.rand(2, 8))
        >>> bool((torch.export.load(made.path).module()(torch.ones(5, 8)) == pruned.model(torch.ones(5, 8))).all())
        True
    """
    model = network_of(model)
    check_choice("to", to, get_args(Target))
    target = check_path("path", path, "net.onnx")
    check_choice("values", values, get_args(Values))
    if to != "hf" and (values != "same" or shard != SHARD or tokenizer is not None):
        raise OptionError(f"values, shard and tokenizer are for to='hf', not for to={to!r}", fix="leave them out")
    if (example is None) == (to in TRACED):
        words = "needs an example: it holds a traced network" if example is None else "takes no example"
        raise OptionError(f"to={to!r} {words}", fix=f"give an example to {' and '.join(TRACED)}, and only there")
    with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
        own = plain_copy(model).to("cpu")
    if to == "hf":
        if values != "same":
            own = own.to({"bf16": torch.bfloat16, "fp16": torch.float16}[values])
        n_bytes, beside = _save_pretrained(own, target, shard, tokenizer)
        return Exported(target, to, n_bytes, beside=beside)
    if to in TRACED:
        turn_off_caches(own.modules())
        call = without_aliases(*call_of(example))
        try_example(own, *call)
        with ONE_AT_A_TIME:  # torch.export, which replaces functions of Python while it works
            return write_onnx(own, call, target) if to == "onnx" else write_program(own, call, target)
    content = _weight_bytes(own, to)
    write_atomic(target, content)
    return Exported(target, to, len(content))


def _weight_bytes(model: nn.Module, to: Target) -> bytes:
    """The state_dict as safetensors or as torch.save writes it; it holds nothing but tensors."""
    state = in_own_memory(model.state_dict())
    if to == "pt":
        file = io.BytesIO()
        torch.save(state, file)
        content = file.getvalue()
        _check_same(state, torch.load(io.BytesIO(content), weights_only=True))
    else:
        content = tensors_to_bytes(state, MARK)
        _check_same(state, safetensors.torch.load(content))
    return content


def _save_pretrained(model: nn.Module, folder: Path, shard: str | int, tokenizer: Any) -> tuple[int, tuple[str, ...]]:
    """Writes the folder with the model's own save_pretrained; returns its bytes and the names of companion files.

    The folder is read back first, and appears atomically.
    """
    save: Any = getattr(model, "save_pretrained", None)
    load: Any = getattr(type(model), "from_pretrained", None)
    if not callable(save) or not callable(load):
        raise ModelError(
            f"{type(model).__name__} has no save_pretrained and from_pretrained",
            fix="give a Hugging Face model, or export to safetensors",
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise OptionError(f"{folder} exists and is not an empty folder", fix="give another name, or move it away")
    with new_folder(folder) as unfinished:
        save(unfinished, max_shard_size=check_size("shard", shard))
        back = load(unfinished, local_files_only=True)
        _check_same(dict(model.state_dict()), dict(back.state_dict()))
        beside = _add_companions(model, unfinished, tokenizer)
        n_bytes = sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file())
    return n_bytes, beside


def _add_companions(model: nn.Module, target: Path, tokenizer: Any) -> tuple[str, ...]:
    """Adds the tokenizer and other companion files, and returns their names."""
    before = {path.name for path in target.iterdir()}
    if tokenizer is not None:
        if not callable(getattr(tokenizer, "save_pretrained", None)):
            raise OptionError(f"the tokenizer is a {type(tokenizer).__name__}", fix="give a tokenizer of transformers")
        tokenizer.save_pretrained(target)
    origin = getattr(getattr(model, "config", None), "_name_or_path", "")
    folder = Path(origin) if isinstance(origin, str) and origin else None
    if tokenizer is None and folder is not None and folder.is_dir():
        for path in companion_files(folder):
            if path.name not in before:
                shutil.copyfile(path, target / path.name)
    return tuple(sorted(path.name for path in target.iterdir() if path.name not in before))


def _check_same(state: dict[str, Tensor], back: dict[str, Tensor]) -> None:
    """Raises ModelError if the tensors read back differ from those written."""
    if set(state) != set(back):
        raise ModelError(
            f"{sorted({*state} ^ {*back})[:3]} are missing after reading the file back", fix="report this network"
        )
    for name, tensor in state.items():
        read = back[name].to(tensor.dtype)  # from_pretrained may read bfloat16 as float32, which holds it exactly
        if tensor.shape != read.shape or not torch.equal(raw_bytes(tensor), raw_bytes(read)):
            raise ModelError("differs after writing and reading it back", where=name, fix="report this network")
