"""Writes a Hugging Face folder, with the model's own save_pretrained, and a model card of what is known.

Hubs read the lines of a card between the two `---`. Its certificate is about the weights before `values` rounded them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sipp import __version__
from sipp.errors import ModelError, OptionError
from sipp.files import new_folder
from sipp.results import AnyCertificate, Pruned, hashing, words
from sipp.storage import companion_files

CARD = "README.md"
REPORT_IT = "this is a bug in sipp: please report it with the model's code"
_SIZE = re.compile(r"[0-9]+(\.[0-9]+)? ?[KMGT]B", re.IGNORECASE | re.ASCII)  # as save_pretrained takes it
PAPER = "[SiPP](https://arxiv.org/abs/1910.05422)"


def model_card(pruned: Pruned, certificate: AnyCertificate | None, *, name: str, values: str) -> str:
    """The text of the card."""
    now = pruned.up_to_date
    origin = _origin(pruned.model)
    is_on_hub = origin.count("/") == 1 and not Path(origin).exists()  # not a folder of this machine
    head = ["---", "library_name: transformers", *([f"base_model: {origin}"] if is_on_hub else [])]
    of_what = f" It is a pruned copy of `{origin}`." if is_on_hub else ""
    lines = [f"{words.sentence(now.headline)}.{of_what} The other weights are zero."]
    if now.repair is not None:
        lines.append(
            f"The kept weights were repaired without labels or training. {words.sentence(now.repair.sentence)}."
        )
    if values != "same":
        lines.append(f"Weights were then rounded to {values}; what follows is about the network before.")
    lines.append(f"**Error.** {words.sentence(now.cost if certificate is None else certificate.sentence)}")
    lines.append(
        "The zeros are stored like other numbers: the model loads like the dense one, takes as much memory and runs "
        f"as fast. Made with sipp {__version__} ({PAPER})."
    )
    return "\n".join([*head, "tags:", "- pruned", "- sipp", "---", "", f"# {name}", "", "\n\n".join(lines), ""])


def _origin(model: nn.Module) -> str:
    """What a Hugging Face model was loaded from; empty if that is not known."""
    origin = getattr(getattr(model, "config", None), "_name_or_path", "")
    return origin if isinstance(origin, str) else ""


def write_folder(
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
    if not (isinstance(shard, str) and _SIZE.fullmatch(shard)) and not (type(shard) is int and shard > 0):
        raise OptionError(f"shard={shard!r:.40} is not a size", fix="give '5GB', or a number of bytes", option="shard")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise OptionError(f"{folder} exists and is not an empty folder", fix="give another name, or move it away")
    with new_folder(folder) as unfinished:
        save(unfinished, max_shard_size=shard)
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
            raise OptionError(
                f"the tokenizer must be one of transformers, not a {type(tokenizer).__name__}",
                fix="give AutoTokenizer.from_pretrained(folder)",
            )
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
        raise ModelError(f"{sorted({*state} ^ {*back})[:3]} are missing after reading the file back", fix=REPORT_IT)
    for name, tensor in state.items():
        read = back[name].to(tensor.dtype)  # from_pretrained may read bfloat16 as float32, which holds it exactly
        if tensor.shape != read.shape or not torch.equal(hashing.raw_bytes(tensor), hashing.raw_bytes(read)):
            raise ModelError("differs after writing and reading it back", where=name, fix=REPORT_IT)
