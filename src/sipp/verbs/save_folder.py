"""`save_folder`: writes a pruned network and its record to a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from sipp.errors import OptionError
from sipp.results import AnyCertificate, Pruned, PrunedTo, SavedNetwork, certificate_of, check, record_of, to_json
from sipp.storage import write_pruned


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
    more = _checked_about(about)
    network, certificate = record_of(pruned), certificate_of(pruned, certificate)
    target, record = check.path("folder", folder, "pruned"), SavedNetwork.of(network, certificate).values
    write_pruned(target, network.model.state_dict(), record | more)
    return target


def _checked_about(about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further entries of the report, in JSON types."""
    if about is None:
        return {}
    if not isinstance(about, Mapping) or not all(isinstance(key, str) for key in about):
        raise OptionError("about= is not a mapping with text as keys", fix="give a dict", option="about")
    values: dict[str, Any] = to_json(about)
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"about= cannot be written as JSON ({error})", fix="give text and numbers", option="about"
        ) from error
    return values
