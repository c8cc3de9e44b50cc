"""`export`: writes a network, zeros included, so that other programs read it.

    NAME.onnx   the network itself, traced on an example (onnx_file.py)
    a folder    a Hugging Face folder that `from_pretrained` of the model's class loads

What is written is read back and compared first: weights bit by bit, an ONNX file by running the example.
"""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.files import new_folder
from sipp.inputs import ONE_AT_A_TIME, turn_off_caches
from sipp.results import (
    AnyCertificate,
    NetworkLike,
    Pruned,
    certificate_of,
    check,
    check_certificate,
    hashing,
    network_of,
    pruned_or_module,
)
from sipp.runtime.copying import plain_copy
from sipp.runtime.examples import call_of, try_example, without_aliases
from sipp.runtime.exported import Exported
from sipp.runtime.model_card import CARD, model_card
from sipp.runtime.onnx_file import write_onnx
from sipp.storage import companion_files

Values = Literal["same", "bf16", "fp16"]
SHARD = "50GB"  # default size of the largest file of weights, as in transformers
ONNX = ".onnx"
OF_TORCH = {  # what a reader may expect here, and the line of torch that writes it
    ".pt": "torch.save(pruned.model.state_dict(), path)",
    ".pth": "torch.save(pruned.model.state_dict(), path)",
    ".pt2": "torch.export.save(torch.export.export(pruned.model, (example,)), path)",
    ".safetensors": "safetensors.torch.save_file(pruned.model.state_dict(), path), or sipp.save for a small file",
}


@torch.inference_mode(False)
def export(
    pruned: NetworkLike,
    path: str | PathLike[str],
    example: Any = None,
    *,
    values: Values = "same",
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
    check.choice("values", values, get_args(Values))
    if target.suffix in OF_TORCH:
        raise OptionError(
            f"path={str(path)!r:.80} is neither NAME{ONNX} nor a Hugging Face folder",
            fix=f"for {target.suffix}, write {OF_TORCH[target.suffix]}",
            option="path",
        )
    is_onnx = target.suffix == ONNX
    if is_onnx and (values != "same" or any(given is not None for given in (shard, tokenizer, certificate))):
        names = "values, shard, tokenizer and certificate"
        raise OptionError(f"{names} are for a folder, not for NAME{ONNX}", fix="leave them out")
    if check.flag("sparse", sparse) and not is_onnx:
        raise OptionError("a folder holds all zeros", fix=f"leave sparse out, or write NAME{ONNX}", option="sparse")
    if is_onnx == (example is None):
        words = "needs an example" if is_onnx else "takes no example: it holds weights"
        what = "an ONNX file" if is_onnx else "a Hugging Face folder"
        raise OptionError(f"{what} {words}", fix=f'write sipp.export(pruned, "net{ONNX}", example)', option="example")
    card = "" if is_onnx else _card(pruned, certificate, target.name, values)
    with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
        own = plain_copy(model).to("cpu")
    if not is_onnx:
        if values != "same":
            own = own.to({"bf16": torch.bfloat16, "fp16": torch.float16}[values])
        n_bytes, beside = _save_pretrained(own, target, SHARD if shard is None else shard, tokenizer, card)
        return Exported(target, "hf", n_bytes, beside=beside)
    turn_off_caches(own.modules())
    call = without_aliases(*call_of(example))
    try_example(own, *call)
    with ONE_AT_A_TIME:  # torch.export, which replaces functions of Python while it works
        return write_onnx(own, call, target, sparse)


def _card(pruned: NetworkLike, certificate: AnyCertificate | None, name: str, values: str) -> str:
    """The model card; empty if nothing is known but the network."""
    check_certificate(certificate)
    record, known = pruned_or_module(pruned), certificate_of(pruned, certificate)
    if not isinstance(record, Pruned):
        return ""
    if known is not None and known.pruned_hash != hashing.of_model(record.model):
        raise OptionError("the certificate is about another network", fix="certify pruned.model", option="certificate")
    return model_card(record, known, name=name, origin=_origin(record.model), values=values)


def _origin(model: nn.Module) -> str:
    """What a Hugging Face model was loaded from; empty if that is not known."""
    origin = getattr(getattr(model, "config", None), "_name_or_path", "")
    return origin if isinstance(origin, str) else ""


def _save_pretrained(
    model: nn.Module, folder: Path, shard: str | int, tokenizer: Any, card: str
) -> tuple[int, tuple[str, ...]]:
    """Writes the folder with the model's own save_pretrained; returns its bytes and the names of companion files.

    The folder is read back first, and appears atomically.
    """
    save: Any = getattr(model, "save_pretrained", None)
    load: Any = getattr(type(model), "from_pretrained", None)
    if not callable(save) or not callable(load):
        raise ModelError(
            f"{type(model).__name__} has no save_pretrained and from_pretrained",
            fix="give a Hugging Face model; or write an ONNX file, NAME.onnx, with an example",
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise OptionError(f"{folder} exists and is not an empty folder", fix="give another name, or move it away")
    with new_folder(folder) as unfinished:
        save(unfinished, max_shard_size=check.size("shard", shard))
        back = load(unfinished, local_files_only=True)
        _check_same(dict(model.state_dict()), dict(back.state_dict()))
        beside = _add_companions(model, unfinished, tokenizer)
        if card:
            (unfinished / CARD).write_text(card, encoding="utf-8")
        n_bytes = sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file())
    return n_bytes, beside


def _add_companions(model: nn.Module, target: Path, tokenizer: Any) -> tuple[str, ...]:
    """Adds the tokenizer and other companion files, and returns their names."""
    before = {path.name for path in target.iterdir()}
    if tokenizer is not None:
        if not callable(getattr(tokenizer, "save_pretrained", None)):
            raise OptionError(f"the tokenizer is a {type(tokenizer).__name__}", fix="give a tokenizer of transformers")
        tokenizer.save_pretrained(target)
    folder = Path(_origin(model)) if _origin(model) else None
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
        if tensor.shape != read.shape or not torch.equal(hashing.raw_bytes(tensor), hashing.raw_bytes(read)):
            raise ModelError("differs after writing and reading it back", where=name, fix="report this network")
