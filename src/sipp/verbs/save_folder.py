"""`save_folder`: writes a pruned network and its record to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from sipp.results.certificate import AnyCertificate
from sipp.results.checking import check_path
from sipp.results.pruned import Pruned
from sipp.results.pruned_to import PrunedTo, certificate_of, record_of
from sipp.results.stored import report_values
from sipp.storage.pruned_folder import write_pruned


@torch.inference_mode(False)
def save_folder(
    pruned: Pruned | PrunedTo,
    folder: str | PathLike[str],
    *,
    certificate: AnyCertificate | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the same folder as `sipp prune --out`, with network and record, and returns its path.

    `sipp report`, `bench`, `eval` and `certify` can read it. Even if the process is killed, it holds either the old
    network or the new one; a folder with other content is refused. A `certificate` must be about this network; the one
    from `prune_to` is stored automatically. `about` is anything else for the report, as JSON values. For one small file
    instead, use `sipp.save`.

    Example:
        >>> import sipp, tempfile, torch
        >>> pruned = sipp.prune(torch.nn.Linear(8, 4), None, keep=0.5, method="magnitude")
        >>> folder = sipp.save_folder(pruned, tempfile.mkdtemp() + "/net")
        >>> sorted(path.name for path in folder.iterdir())
        ['model.safetensors', 'report.json']
    """
    network, certificate = record_of(pruned), certificate_of(pruned, certificate)
    target, record = check_path("folder", folder, "pruned"), report_values(network, certificate)
    write_pruned(target, network.model.state_dict(), record | dict(about or {}))
    return target
