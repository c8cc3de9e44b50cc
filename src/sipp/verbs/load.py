"""`load`: reads the network from a file that `save` wrote."""

from __future__ import annotations

from os import PathLike
from typing import overload

import torch
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError, warn_caller
from sipp.inputs import check_can_be_written
from sipp.results import SavedFile, check, hashing, words
from sipp.storage import decode, named_tensors, read_contents

OTHER_BUFFERS = (
    "buffers that are not part of a state_dict (persistent=False) have other values in `into` than in the saved "
    "network, so a stored certificate does not cover it; set them, or certify again"
)


@overload
def load(path: str | PathLike[str], into: None = None) -> dict[str, Tensor]: ...
@overload
def load(path: str | PathLike[str], into: nn.Module) -> nn.Module: ...
@torch.inference_mode(False)
def load(path: str | PathLike[str], into: nn.Module | None = None) -> nn.Module | dict[str, Tensor]:
    """Loads the network from a file written by `save`: into the model `into`, or as a plain state_dict on the CPU.

    `into` is returned in eval mode, ready to use; call `.train()` to go on training. Names, shapes and dtypes must
    match those of `into`; if anything is wrong, it is left as it was. The file's masks are in
    `sipp.inspect(path).masks`.

    Example:
        >>> import sipp, tempfile, torch
        >>> net = torch.nn.Linear(4, 2)
        >>> path = tempfile.mkdtemp() + "/net.sipp.safetensors"
        >>> _ = sipp.save(net, path)
        >>> sorted(sipp.load(path))
        ['bias', 'weight']
    """
    if into is not None and not isinstance(into, nn.Module):
        raise OptionError(
            f"into must be an nn.Module, not a {type(into).__name__}", fix="leave it out to load a plain state_dict"
        )
    file = check.path("path", path, "net.sipp.safetensors")
    contents, data = read_contents(file)
    if into is not None:
        check_can_be_written(into)
        _check_fits(contents, into)
    state, contents = decode(contents, data)
    if into is None:
        return state
    for names, _ in named_tensors(into):
        if any(not torch.equal(state[name], state[names[0]]) for name in names[1:]):
            raise ModelError(f"{', '.join(names)}: one tensor in the model, different ones in {file}; untie them")
    into.load_state_dict(state, strict=True)
    into.eval()
    is_known = contents.certificate is not None or contents.buffers_hash is not None
    if is_known and hashing.of_buffers(into) != contents.buffers_hash:
        warn_caller(f"{file}: {OTHER_BUFFERS}")
    return into


def _check_fits(contents: SavedFile, model: nn.Module) -> None:
    """Raises a ModelError that names the tensors whose name, shape or dtype differs between model and file."""
    in_model = {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for names, tensor in named_tensors(model)
        for name in names
    }
    in_file = {name: f"{tensor.dtype} {list(tensor.shape)}" for tensor in contents.tensors for name in tensor.names}
    differences = [
        f"{name} is {in_file.get(name, 'absent')} in the file, {in_model.get(name, 'absent')} in the model"
        for name in in_model | in_file
        if in_file.get(name) != in_model.get(name)
    ]
    if differences:
        raise ModelError(
            words.listed(differences, "; "),
            where=contents.path,
            fix=f"build the saved {contents.model}, or load without `into`",
        )
