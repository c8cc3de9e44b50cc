"""`inspect`: shows what is in a file that `save` wrote, or in a folder of `save_folder`."""

from __future__ import annotations

from os import PathLike

import torch

from sipp.results import SavedNetwork, check
from sipp.storage import decode, read_contents, read_pruned


@torch.inference_mode(False)
def inspect(path: str | PathLike[str]) -> SavedNetwork:
    """Returns the record of the network in a file of `save` or a folder of `save_folder`. `print` it.

    It is checked as `load` does. For a file, the record also describes how it is stored (`SavedFile`).

    Example:
        >>> import sipp, tempfile, torch
        >>> path = tempfile.mkdtemp() + "/net.sipp.safetensors"
        >>> _ = sipp.save(torch.nn.Linear(4, 2), path)
        >>> [(tensor.names, tensor.positions, tensor.n_bytes) for tensor in sipp.inspect(path).tensors]
        [(('weight',), 'all', 32), (('bias',), 'all', 8)]
    """
    place = check.path("path", path, "net.sipp.safetensors")
    return read_pruned(place) if place.is_dir() else decode(*read_contents(place))[1]
