"""`inspect`: shows what is inside a file that `save` wrote."""

from __future__ import annotations

from os import PathLike

import torch

from sipp.results.checking import check_path
from sipp.results.saved_file import SavedFile
from sipp.storage.small_file import decode, read_contents


@torch.inference_mode(False)
def inspect(path: str | PathLike[str]) -> SavedFile:
    """Returns what is in a file written by `save`, after the same checks as `load`. `print` it.

    Example:
        >>> import sipp, tempfile, torch
        >>> path = tempfile.mkdtemp() + "/net.sipp.safetensors"
        >>> _ = sipp.save(torch.nn.Linear(4, 2), path)
        >>> [(tensor.names, tensor.positions, tensor.n_bytes) for tensor in sipp.inspect(path).tensors]
        [(('weight',), 'all', 32), (('bias',), 'all', 8)]
    """
    return decode(*read_contents(check_path("path", path, "net.sipp.safetensors")))[1]
