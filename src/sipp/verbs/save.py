"""`save`: writes a pruned network to one small file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import get_args

import torch
from torch import Tensor, nn

from sipp import __version__
from sipp.errors import ModelError, OptionError, warn_caller
from sipp.pruning.torch_masks import masked_by_torch
from sipp.results.certificate import AnyCertificate, check_certificate
from sipp.results.checking import check_choice, check_path, check_size
from sipp.results.display import listed
from sipp.results.jsonio import to_json
from sipp.results.network_hash import buffers_hash, class_name, model_hash
from sipp.results.options import Precision
from sipp.results.pruned import Pruned, up_to_date
from sipp.results.pruned_to import NetworkLike, certificate_of, pruned_or_module
from sipp.results.saved_file import SavedFile, StoredStatements
from sipp.storage.small_file.file_format import MARK, MARK_OF_PARTS, Index, pack, write_index
from sipp.storage.small_file.network import (
    Groups,
    cannot_share,
    contents_of,
    decode_network,
    encode_network,
    named_tensors,
)
from sipp.storage.small_file.parts import planned_parts, write_network

MANY_NEGATIVE = 0.01  # share of weights that are -0.0; above it, `save` warns


@torch.inference_mode(False)
def save(
    pruned: NetworkLike,
    path: str | PathLike[str],
    *,
    values: Precision = "fp32",
    masks: Mapping[str, Tensor] | None = None,
    certificate: AnyCertificate | None = None,
    shard: str | int | None = None,
) -> SavedFile:
    """Writes a network to one small file, and returns what is in it: bytes, encodings, changed values. `print` it.

    `values`: "fp32" and "lossless" keep every bit ("lossless" compresses the bytes of all numbers, which takes longer);
    "fp16", "bf16" and "int8" (one scale per row) round parameters with two or more axes, and nothing else. For a plain
    module you can pass `masks`; otherwise its zeros count as pruned (but not -0.0: a warning says what to do). A
    `certificate` must be about this network, or about the network as it will be read from the file; the one from
    `prune_to` is stored automatically. `shard` ("5GB", or bytes) is the size of the largest file: the numbers are then
    in several parts next to it.

    Example:
        >>> import sipp, tempfile, torch
        >>> net = torch.nn.Linear(100, 100)
        >>> pruned = sipp.prune(net, None, keep=0.1, method="wt")
        >>> path = tempfile.mkdtemp() + "/net.sipp.safetensors"
        >>> sipp.save(pruned, path).n_bytes < 0.18 * 4 * 100 * 100
        True
        >>> same = sipp.load(path, into=torch.nn.Linear(100, 100))
        >>> torch.equal(same.weight, pruned.model.weight)
        True
    """
    certificate = certificate_of(pruned, certificate)
    pruned = pruned_or_module(pruned)
    model, masks = _network(pruned, masks)
    target = check_path("path", path, "net.sipp.safetensors")
    check_choice("values", values, get_args(Precision))
    check_certificate(certificate)
    if masked := masked_by_torch(model):
        raise ModelError(
            f"{listed(masked)}: masked by torch.nn.utils.prune, which stores every weight and a mask",
            fix="call sipp.release(model) first, which makes its masks permanent",
        )
    groups = named_tensors(model, first=masks)
    _warn_of_negative_zeros(groups)
    mask_of = _masks_by_first_name(groups, masks)
    entries, pieces = encode_network(model, groups, mask_of, values)
    parts = [] if shard is None else planned_parts(target, pieces, check_size("shard", shard))
    index = Index(
        model=class_name(model),
        sipp=__version__,
        torch=str(torch.__version__),
        precision=values,
        statements=_statements(pruned) if isinstance(pruned, Pruned) else None,
        certificate=None if certificate is None else json.dumps(to_json(certificate)),
        buffers_hash=buffers_hash(model),
        parts=tuple(part for part, _ in parts),
        tensors=entries,
    )
    stored, _ = decode_network(index, map(memoryview, pieces), "the network")
    if index.is_rounded and (apart := cannot_share(groups, stored)):
        raise ModelError(
            f"{', '.join(apart)} share memory in two layouts (a transposed tie); {values} would round them differently",
            fix="save with values='fp32' or 'lossless', or untie them",
        )
    content, digest = pack(write_index(index), *(() if parts else pieces), mark=MARK_OF_PARTS if parts else MARK)
    cpu_masks = {name: mask.detach().to("cpu", copy=True) for name, mask in mask_of.items()}
    saved = contents_of(
        index, path=target, sha256=digest, n_bytes=len(content), masks=cpu_masks, certificate=certificate, state=stored
    )
    is_about_stored = saved.certificate_about == "stored values"
    if certificate is not None and not is_about_stored and certificate.pruned_hash != model_hash(model):
        raise OptionError("the certificate is about another network than the one to save; certify this one")
    return replace(saved, n_bytes=write_network(target, content, parts))


def _network(pruned: Pruned | nn.Module, masks: Mapping[str, Tensor] | None) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """The model to save, and its masks."""
    if isinstance(pruned, Pruned):
        if masks is not None:
            raise OptionError(
                "masks cannot be given with a pruned record, which has its own",
                fix="give pruned.model to save it with others",
            )
        return pruned.model, pruned.masks
    if not isinstance(pruned, nn.Module):
        raise OptionError(
            f"a {type(pruned).__name__} cannot be saved",
            fix="pass what sipp.prune or sipp.prune_to returned, or an nn.Module",
        )
    if masks is not None and not isinstance(masks, Mapping):
        raise OptionError(f"masks is a {type(masks).__name__}", fix="give {parameter name: bool tensor}")
    return pruned, masks or {}


def _warn_of_negative_zeros(groups: Groups) -> None:
    """Warns of many -0.0: a file keeps every bit, so each takes as much space as a weight that was kept."""
    candidates = (tensor for _, tensor in groups if tensor.is_floating_point() and tensor.dim() >= 2)
    weights = [tensor for tensor in candidates if tensor.element_size() > 1]  # torch has no signbit for float8
    n_negative = sum(int(((tensor == 0) & torch.signbit(tensor)).sum()) for tensor in weights)
    if n_negative > MANY_NEGATIVE * sum(tensor.numel() for tensor in weights):
        warn_caller(
            f"{n_negative:,} weights are -0.0, which torch.nn.utils.prune.remove leaves behind, and each takes as much "
            "space as a weight that was kept. Call p.data.add_(0.0) for every p in model.parameters() before you "
            "certify and save; or call sipp.release(model) instead of remove"
        )


def _masks_by_first_name(groups: Groups, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks by the first name of each tensor, checked; tied names must have equal masks."""
    first = {name: (names[0], tensor) for names, tensor in groups for name in names}
    if unknown := [str(name) for name in masks if name not in first]:
        raise OptionError(f"masks name no tensor of the model: {listed(unknown)}; it has {listed([*first])}")
    by_first_name: dict[str, Tensor] = {}
    for name, mask in masks.items():
        first_name, tensor = first[name]
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != tensor.shape:
            raise OptionError(f"masks[{name!r}] must be a bool tensor of shape {tuple(tensor.shape)}, True = kept")
        if first_name in by_first_name and not torch.equal(by_first_name[first_name].cpu(), mask.cpu()):
            raise OptionError(
                f"masks[{name!r}] differs from that of {first_name}, which is the same tensor", fix="give one of them"
            )
        by_first_name[first_name] = mask
    return by_first_name


def _statements(pruned: Pruned) -> StoredStatements:
    """How the network was pruned and what is guaranteed, as sentences for the file."""
    now = up_to_date(pruned)
    keys = ("method", "draws", "budget", "kept", "n_weights", "seed", "pattern")
    return StoredStatements(
        **{key: getattr(now, key) for key in keys},
        network=now.bound.sentence,
        rows_and_layers=None if now.guarantee is None else now.guarantee.sentence,
        measured=None if now.measured is None else now.measured.sentence,
    )
