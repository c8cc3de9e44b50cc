"""`save`: writes a pruned network to one small file."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from sipp.errors import ModelError, OptionError, warn_caller
from sipp.files import write_atomic
from sipp.results import (
    AnyCertificate,
    NetworkLike,
    Precision,
    Pruned,
    PrunedTo,
    SavedFile,
    Shrunk,
    certificate_of,
    check,
    hashing,
    network_of,
    words,
)
from sipp.storage import decode, encode, file_content

MANY_NEGATIVE = 0.01  # share of weights that are -0.0; above it, `save` warns


@torch.inference_mode(False)
def save(
    pruned: NetworkLike,
    path: str | PathLike[str],
    *,
    values: Precision = "fp32",
    certificate: AnyCertificate | None = None,
) -> SavedFile:
    """Writes a network to one small file, and returns what is in it: bytes, encodings, changed values. `print` it.

    `values`: "fp32" and "lossless" keep every bit ("lossless" compresses the bytes of all numbers, which takes longer);
    "fp16", "bf16" and "int8" (one scale per row) round parameters with two or more axes, and nothing else. The zeros of
    a plain module count as pruned (but not -0.0: a warning says what to do). A `certificate` must be about this
    network, or about the network as it will be read from the file; the one from `prune_to` is stored automatically.
    An existing file is replaced.

    Example:
        >>> import sipp, tempfile, torch
        >>> net = torch.nn.Linear(100, 100)
        >>> pruned = sipp.prune(net, None, keep=0.1, method="magnitude")
        >>> path = tempfile.mkdtemp() + "/net.sipp.safetensors"
        >>> sipp.save(pruned, path).n_bytes < 0.18 * 4 * 100 * 100
        True
        >>> same = sipp.load(path, into=torch.nn.Linear(100, 100))
        >>> torch.equal(same.weight, pruned.model.weight)
        True
    """
    target = check.path("path", path, "net.sipp.safetensors")
    if isinstance(pruned, Shrunk):
        warn_caller(
            "the file contains no network, and only a network of these smaller layers can load it; "
            "torch.save(small.model, FILE) stores both"
        )
    content, contents = content_of(pruned, target, values=values, certificate=certificate)
    write_atomic(target, content)
    return contents


def content_of(
    pruned: NetworkLike, target: Path, *, values: Precision = "fp32", certificate: AnyCertificate | None = None
) -> tuple[bytes, SavedFile]:
    """The bytes of the file that `save` writes, and what is in it."""
    certificate = certificate_of(pruned, certificate)
    model = network_of(pruned)
    network = pruned.pruned if isinstance(pruned, PrunedTo) else pruned
    check.choice("values", values, get_args(Precision))
    names = model.state_dict().keys()
    masked = [name.removesuffix("_mask") for name in names if name.endswith("_mask")]
    if masked := [name for name in masked if f"{name}_orig" in names]:
        raise ModelError(
            f"{words.listed(masked)}: masked by torch.nn.utils.prune, which stores every weight and a mask",
            fix="call sipp.release(model) first, which makes its masks permanent",
        )
    entries, pieces = encode(model, network.masks if isinstance(network, Pruned) else {}, values)
    _warn_of_negative_zeros(model)
    own_hash = hashing.of_model(model)
    contents = SavedFile(
        path=target,
        model=hashing.class_name(model),
        pruned_hash=own_hash,
        buffers_hash=hashing.of_buffers(model),
        certificate=certificate,
        pruned=network.for_a_file if isinstance(network, Pruned) else None,
        precision=values,
        tensors=entries,
    )
    data = b"".join(pieces)
    state, contents = decode(contents, memoryview(data))
    if contents.rounding_words:
        stored_hash = hashing.with_buffers(hashing.of_state(state), contents.buffers_hash)
        contents = replace(contents, pruned_hash=stored_hash)
    is_about_stored = contents.certificate_about == "stored values"
    if certificate is not None and not is_about_stored and certificate.pruned_hash != own_hash:
        raise OptionError("the certificate is about another network than the one to save; certify this one")
    return file_content(contents, data)


def _warn_of_negative_zeros(model: nn.Module) -> None:
    """Warns of many -0.0: a file keeps every bit, so each takes as much space as a weight that was kept."""
    candidates = (tensor for tensor in model.state_dict().values() if tensor.is_floating_point() and tensor.dim() >= 2)
    weights = [tensor for tensor in candidates if tensor.element_size() > 1]  # torch has no signbit for float8
    n_negative = sum(int(((tensor == 0) & torch.signbit(tensor)).sum()) for tensor in weights)
    if n_negative > MANY_NEGATIVE * sum(tensor.numel() for tensor in weights):
        warn_caller(
            f"{n_negative:,} weights are -0.0, which torch.nn.utils.prune.remove leaves behind, and each takes as much "
            "space as a weight that was kept. Call p.data.add_(0.0) for every p in model.parameters() before you "
            "certify and save; or call sipp.release(model) instead of remove"
        )
