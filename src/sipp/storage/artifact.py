"""A pruned network as one small file: `save`, `load`, `inspect`.

    network -> each tensor: positions (positions.py), values (rounding.py, planes.py) -> index + data -> container.py

The file is a safetensors file and holds every entry of the state_dict, masks, how the network was pruned and what is
said about it. Nothing in it is ever unpickled, and nothing it says is believed: its SHA-256 is compared first, then
the index is checked, and then every size, before memory is asked for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import get_args, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.restore import check_can_be_written
from sipp.records.certificate import AccuracyCertificate, AnyCertificate, Certificate, from_json, to_json
from sipp.records.identity import with_buffers
from sipp.records.network_hash import buffers_hash, model_hash, state_hash
from sipp.records.pruned import Pruned, as_it_is
from sipp.records.pruned_to import Given, without_walk
from sipp.storage import container
from sipp.storage.artifact_index import Entry, Index, Statements, class_name, read_index, write_index
from sipp.storage.contents import About, Contents, contents_of
from sipp.storage.files import write_atomic
from sipp.storage.marks import Precision
from sipp.storage.planes import DTYPES, cut
from sipp.storage.rounding import restore_values, round_values
from sipp.storage.stored_tensor import decode_tensor, encode_tensor, rounding_of
from sipp.storage.ties import Groups, bits_differ, sharing_of, torn

N_SHOWN = 5  # names in an error
OTHER_BUFFERS = (
    "what was saved, and its certificate if it has one, is a network with other values in buffers that no state_dict "
    "holds (persistent=False) than `into` has; set them, or certify this network"
)


@torch.inference_mode(False)
def save(
    pruned: Given,
    path: str | PathLike[str],
    *,
    values: Precision = "fp32",
    masks: Mapping[str, Tensor] | None = None,
    certificate: AnyCertificate | None = None,
) -> Contents:
    """Writes a network to one small file, and gives what is in it: bytes, encodings, how far values moved. `print` it.

    `values`: "fp32" and "lossless" keep every bit ("lossless" codes the bytes of all numbers, which takes longer);
    "fp16", "bf16" and "int8" (one scale a row) round the parameters of two axes or more, nothing else. A plain module
    may come with `masks`; without, its zeros are what is not kept. A `certificate` must be about this network, or
    about what the file will give back.

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
    pruned = without_walk(pruned)
    model, masks = _network(pruned, masks)
    target = _path(path)
    if not isinstance(values, str) or values not in get_args(Precision):
        raise OptionError(f"values={values!r:.40} is unknown", fix=f"choose one of {', '.join(get_args(Precision))}")
    if certificate is not None and not isinstance(certificate, (Certificate, AccuracyCertificate)):
        raise OptionError(f"certificate is a {type(certificate).__name__}", fix="give what sipp.certify gave")
    groups = _tensors(model, first=masks)
    mask_of = _masks_by_group(groups, masks)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    entries, pieces = [], []
    for names, tensor in groups:
        rounding = rounding_of(tensor, values, is_parameter=not parameters.isdisjoint(names))
        entry, parts = encode_tensor(names, tensor, mask_of.get(names[0]), rounding, coded=values != "fp32")
        entries.append(entry)
        pieces += parts
    index = _index(pruned, model, values, certificate, entries)
    data = b"".join(pieces)
    if index.is_moved:
        _refuse_torn(groups, index, data)
    about = None if certificate is None else _about_ours(certificate, model, index, data)
    content, digest = container.pack(write_index(index), data)
    write_atomic(target, content)
    return contents_of(
        index,
        path=target,
        sha256=digest,
        n_bytes=len(content),
        masks={name: mask.detach().to("cpu", copy=True) for name, mask in mask_of.items()},
        certificate=certificate,
        certificate_about=about,
    )


@overload
def load(path: str | PathLike[str], *, into: None = None) -> dict[str, Tensor]: ...
@overload
def load(path: str | PathLike[str], *, into: nn.Module) -> nn.Module: ...
@torch.inference_mode(False)
def load(path: str | PathLike[str], *, into: nn.Module | None = None) -> nn.Module | dict[str, Tensor]:
    """The network of a file of `save`: in `into`, which is given back, or as a plain state_dict on the CPU.

    Names, shapes and dtypes must be those of `into`; it is left as it was where anything is wrong. The file's
    masks are in `sipp.inspect(path).masks`.

    Example:
        >>> import sipp, tempfile, torch
        >>> net = torch.nn.Linear(4, 2)
        >>> path = tempfile.mkdtemp() + "/net.sipp.safetensors"
        >>> _ = sipp.save(net, path)
        >>> sorted(sipp.load(path))
        ['bias', 'weight']
    """
    if into is not None and not isinstance(into, nn.Module):
        raise OptionError(f"into is a {type(into).__name__}", fix="give an nn.Module, or leave it out for a state_dict")
    file = _path(path)
    where = str(file)
    index, data, _ = _read(file)
    if into is not None:
        check_can_be_written(into)
        _check_fits(index, into, where)
    state, _ = _decode(index, data, where)
    certificate, _ = _certificate(index, state, where)
    if into is None:
        return state
    groups = _tensors(into)
    tied = next((n for n, _ in groups if any(bits_differ(state[n[0]], state[other]) for other in n[1:])), ())
    if names := tied or torn(sharing_of(groups), state):
        raise ModelError(f"{', '.join(names)}: one tensor in the model, different ones in {where}; untie them")
    into.load_state_dict(state, strict=True)
    is_known = certificate is not None or index.buffers_hash is not None
    if is_known and buffers_hash(into) != index.buffers_hash:
        warnings.warn(f"{where}: {OTHER_BUFFERS}", stacklevel=2)
    return into


@torch.inference_mode(False)
def inspect(path: str | PathLike[str]) -> Contents:
    """What is inside a file of `save`, after the same checks as `load`: `print` it.

    Example:
        >>> import sipp, tempfile, torch
        >>> path = tempfile.mkdtemp() + "/net.sipp.safetensors"
        >>> _ = sipp.save(torch.nn.Linear(4, 2), path)
        >>> [(one.names, one.positions, one.n_bytes) for one in sipp.inspect(path).tensors]
        [(('weight',), 'all', 32), (('bias',), 'all', 8)]
    """
    file = _path(path)
    where = str(file)
    index, data, digest = _read(file)
    state, masks = _decode(index, data, where)
    certificate, about = _certificate(index, state, where)
    return contents_of(
        index,
        path=file,
        sha256=digest,
        n_bytes=file.stat().st_size,
        masks=masks,
        certificate=certificate,
        certificate_about=about,
    )


def as_stored(model: nn.Module, values: Precision) -> nn.Module:
    """A copy of the network with the values that a file of `save` would give back: what is to be certified."""
    stored = copy.deepcopy(model)
    parameters = {name for name, _ in stored.named_parameters(remove_duplicate=False)}
    for names, tensor in _tensors(stored):
        rounding = rounding_of(tensor, values, is_parameter=not parameters.isdisjoint(names))
        if rounding == "exact":
            continue
        flat_K = tensor.detach().to("cpu").reshape(-1)
        n_rows = tensor.shape[0]
        row_K = torch.arange(n_rows, dtype=torch.int64, device="cpu").repeat_interleave(tensor[0].numel())
        rounded = round_values(flat_K, row_K, n_rows, rounding, names[0])
        back_K = restore_values(rounded.stored_K, rounded.scale_F, row_K, tensor.dtype)
        with torch.no_grad():
            tensor.copy_(back_K.reshape(tensor.shape))
    return stored


def _path(path: str | PathLike[str]) -> Path:
    """The path, if it can be a file's."""
    if not isinstance(path, (str, PathLike)) or not Path(path).name or "\0" in str(path):
        raise OptionError(f"path={path!r:.80} is no path of a file", fix="give one such as 'net.sipp.safetensors'")
    return Path(path)


# --- what is saved --------------------------------------------------------------------------------------------------


def _network(pruned: Pruned | nn.Module, masks: Mapping[str, Tensor] | None) -> tuple[nn.Module, Mapping[str, Tensor]]:
    if isinstance(pruned, Pruned):
        if masks is not None:
            raise OptionError("masks: a pruned record has its own", fix="give pruned.model to save it with others")
        return pruned.model, pruned.masks
    if not isinstance(pruned, nn.Module):
        raise OptionError(
            f"a {type(pruned).__name__} cannot be saved",
            fix="give what sipp.prune or sipp.prune_to gave, or an nn.Module",
        )
    if masks is not None and not isinstance(masks, Mapping):
        raise OptionError(f"masks is a {type(masks).__name__}", fix="give {parameter name: bool tensor}")
    return pruned, masks or {}


def _tensors(model: nn.Module, first: Collection[str] = ()) -> Groups:
    """Every tensor of the state_dict once, with all names of the same memory, those in `first` in front."""
    groups: dict[object, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(f"a {type(value).__name__} in the state_dict; only tensors can be saved", where=name)
        if not name.isprintable():
            raise ModelError(
                "a name in the state_dict that cannot be printed", where=f"{name!r}", fix="rename that module"
            )
        if is_lazy(value) or value.is_meta or value.layout != torch.strided:
            raise ModelError(
                "has no plain numbers (lazy, meta or sparse)", where=name, fix="run or load the model first"
            )
        if str(value.dtype).removeprefix("torch.") not in DTYPES:
            raise ModelError(
                f"the dtype {value.dtype} cannot be stored", where=name, fix=f"convert it to one of {', '.join(DTYPES)}"
            )
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        groups.setdefault(memory if value.numel() else name, ([], value))[0].append(name)
    return [(tuple(sorted(names, key=lambda name: name not in first)), tensor) for names, tensor in groups.values()]


def _about_ours(certificate: AnyCertificate, model: nn.Module, index: Index, data: bytes) -> About:
    """What a certificate is about, of a network to save and its file; OptionError where that is neither."""
    about = _about(certificate, index, _decode(index, memoryview(data), "the network")[0])
    if about != "stored values" and certificate.pruned_hash != model_hash(model):
        raise OptionError("certificate is about another network than the one to save; certify this one")
    return about


def _refuse_torn(groups: Groups, index: Index, data: bytes) -> None:
    """Raises where rounding gives tensors that share memory different numbers."""
    sharing = sharing_of(groups)
    if sharing and (apart := torn(sharing, _decode(index, memoryview(data), "the network")[0])):
        raise ModelError(
            f"{', '.join(apart)} share memory in two layouts (a transposed tie); {index.precision} rounds them apart",
            fix="save with values='fp32' or 'lossless', or untie them",
        )


def _masks_by_group(groups: Groups, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks under the first name of their tensor."""
    first = {name: (names[0], tensor) for names, tensor in groups for name in names}
    if unknown := [str(name) for name in masks if name not in first]:
        raise OptionError(f"masks name no tensor of the model: {_listed(unknown)}; it has {_listed([*first])}")
    found: dict[str, Tensor] = {}
    for name, mask in masks.items():
        root, tensor = first[name]
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != tensor.shape:
            raise OptionError(f"masks[{name!r}] must be a bool tensor of shape {tuple(tensor.shape)}, True = kept")
        if root in found and not torch.equal(found[root].cpu(), mask.cpu()):
            raise OptionError(
                f"masks[{name!r}] differs from that of {root}, which is the same tensor", fix="give one of them"
            )
        found[root] = mask
    return found


def _index(
    pruned: Pruned | nn.Module,
    model: nn.Module,
    values: Precision,
    certificate: AnyCertificate | None,
    entries: list[Entry],
) -> Index:
    from sipp import __version__

    said = None
    if isinstance(pruned, Pruned):
        pruned = as_it_is(pruned)
        said = Statements(
            method=pruned.method,
            draws=pruned.draws,
            budget=pruned.budget,
            kept=pruned.kept,
            n_weights=pruned.n_weights,
            seed=pruned.seed,
            network=str(pruned.bound),
            rows_and_layers=None if pruned.guarantee is None else str(pruned.guarantee),
            measured=None if pruned.measured is None else str(pruned.measured),
            pattern=pruned.pattern,
        )
    return Index(
        model=class_name(model),
        sipp=__version__,
        torch=str(torch.__version__),
        precision=values,
        statements=said,
        certificate=None if certificate is None else to_json(certificate),
        buffers_hash=buffers_hash(model),
        tensors=tuple(entries),
    )


# --- what is read ---------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[Index, memoryview, str]:
    code, data, digest = container.unpack(path)
    return read_index(code, len(data), str(path)), data, digest


def _decode(index: Index, data: memoryview, where: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state_dict, tied names leading to one tensor, and the masks."""
    state, masks = {}, {}
    for entry, piece in zip(index.tensors, cut(data, [entry.n_bytes for entry in index.tensors])):
        tensor, mask = decode_tensor(entry, piece, where)
        state.update(dict.fromkeys(entry.names, tensor))
        if mask is not None:
            masks[entry.name] = mask
    return state, masks


def _certificate(index: Index, state: dict[str, Tensor], where: str) -> tuple[AnyCertificate | None, About | None]:
    """The certificate, its numbers computed again, what it is about; DataError where that is another network."""
    if index.certificate is None:
        return None, None
    try:
        certificate = from_json(index.certificate)
    except DataError as error:
        raise DataError(f"{error}", where=where) from error
    about = _about(certificate, index, state)
    if about != "stored values" and not index.is_moved:
        raise DataError("its certificate is about another network; do not rely on it, certify this one", where=where)
    return certificate, about


def _about(certificate: AnyCertificate, index: Index, state: dict[str, Tensor]) -> About:
    """A certificate is about the stored values if, and only if, they have the hash it was made for."""
    stored = with_buffers(state_hash(state), index.buffers_hash)
    return "stored values" if certificate.pruned_hash == stored else "values before rounding"


def _check_fits(index: Index, model: nn.Module, where: str) -> None:
    """Raises ModelError with the names where the model has other names, shapes or dtypes than the file."""
    own = model.state_dict()
    stored = {name: entry for entry in index.tensors for name in entry.names}
    if missing := [name for name in own if name not in stored]:
        raise ModelError(
            f"{where} does not hold {_listed(missing)}, which the model has; build the saved {index.model}"
        )
    if unknown := [name for name in stored if name not in own]:
        raise ModelError(f"{where} holds {_listed(unknown)}, which the model has not; build the saved {index.model}")
    _tensors(model)  # lazy, meta and other tensors that cannot take values
    found = {name: (tuple(own[name].shape), str(own[name].dtype).removeprefix("torch.")) for name in own}
    wrong = [
        f"{name} is {entry.dtype} {list(entry.shape)} in the file, {found[name][1]} {list(found[name][0])} in the model"
        for name, entry in stored.items()
        if (entry.shape, entry.dtype) != found[name]
    ]
    if wrong:
        raise ModelError(
            f"{_listed(wrong, '; ')}; build the model as it was saved, or load without `into`", where=where
        )


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f" and {len(names) - N_SHOWN} more" if len(names) > N_SHOWN else ""
    return separator.join(f"{name:.200}" for name in names[:N_SHOWN]) + more
