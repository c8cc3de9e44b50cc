"""A folder of Hugging Face as a network, and text files as its points: `--model hf:DIR --data sentences.txt`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, OptionError
from sipp.extras import needed_for

PREFIX = "hf:"
MOST_TEXT = 1 << 28  # bytes of a file of sentences: they are held in memory
MOST_NAMES = 4
WHOLE = "give a whole folder of save_pretrained with model.safetensors"
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")  # one of which holds the vocabulary
LABEL_SEPARATOR = "\t"


def folder_of(spec: str) -> Path:
    """The folder that `hf:DIR` names, with its config.json; nothing is fetched."""
    folder = Path(spec.removeprefix(PREFIX))
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"{folder} is no folder of a Hugging Face model (no config.json)",
            fix="give hf:DIR, a folder that save_pretrained wrote; nothing is downloaded",
        )
    return folder


def hf_model(spec: str) -> nn.Module:
    """The network of the folder, of the class that its configuration names, from safetensors only: no code is run."""
    with needed_for("--model hf:DIR"):
        import transformers
    folder = folder_of(spec)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what it would tell of is refused below
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        names = getattr(config, "architectures", None) or []
        kind: Any = getattr(transformers, names[0], None) if names else None
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            kind = transformers.AutoModel
        made: Any = kind.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # a folder may be broken in any way
        reason = f"{type(error).__name__}: {error!s:.200}"
        if "ignore_mismatched_sizes" in reason:  # advice that is not for here
            reason = "its config.json and its weights have other shapes"
        raise ModelError(f"{folder} could not be loaded ({reason})", fix=WHOLE) from error
    network: nn.Module = made[0]
    missing, unknown = (sorted(made[1][key]) for key in ("missing_keys", "unexpected_keys"))
    if missing:  # which transformers fills with random numbers
        raise ModelError(f"{folder} has no weights for {_some(missing)} of {type(network).__name__}", fix=WHOLE)
    if unknown:
        warnings.warn(f"{folder}: {type(network).__name__} has no place for {_some(unknown)}, left out", stacklevel=2)
    return network


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if names[MOST_NAMES:] else "")


def sentences(path: Path, model: str) -> dict[str, Tensor]:
    """The lines of a text file as the folder's tokenizer reads them; `sentence<TAB>number` gives labels too."""
    if not model.startswith(PREFIX):
        raise DataError(
            f"{path.name} holds text, and {model or 'the network'} has no tokenizer", fix="give --model hf:DIR"
        )
    folder = folder_of(model)
    if not any(found for name in TOKENIZERS for found in folder.glob(name)):  # transformers would make an empty one
        raise DataError(
            f"{folder} holds no tokenizer ({', '.join(TOKENIZERS)})", fix="save it there: tokenizer.save_pretrained"
        )
    with needed_for("text files as data"):
        import transformers
    if path.stat().st_size > MOST_TEXT:
        raise DataError(f"{path} has more than {MOST_TEXT:,} bytes", fix="split it")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # no text, or a broken tokenizer
        raise DataError(
            f"{path} could not be read with the tokenizer of {folder} ({type(error).__name__})",
            fix="give UTF-8 text, one sentence a line, and a folder that holds its tokenizer",
        ) from error
    lines = [line for line in lines if line]
    if not lines:
        raise DataError(f"{path} holds no sentences", fix="give one sentence a line")
    texts, labels = _labelled(lines)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    most = getattr(
        transformers.AutoConfig.from_pretrained(folder, local_files_only=True), "max_position_embeddings", 512
    )
    found = tokenizer(texts, padding=True, truncation=True, max_length=min(most, 512), return_tensors="pt")
    _warn_of_unknown(found["input_ids"], tokenizer, path)
    return dict(found) | ({} if labels is None else {"labels": labels})


def _warn_of_unknown(ids: Tensor, tokenizer: Any, path: Path) -> None:
    """Warns where most words are none that the tokenizer knows: the points would be all alike."""
    special = torch.tensor([i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id], device="cpu")
    words = ids[~torch.isin(ids, special)]
    share = float((words == tokenizer.unk_token_id).float().mean()) if tokenizer.unk_token_id is not None else 0.0
    if share > 0.5:
        warnings.warn(f"{path.name}: the tokenizer does not know {share:.0%} of the words", stacklevel=2)


def _labelled(lines: list[str]) -> tuple[list[str], Tensor | None]:
    """The sentences and their class numbers, where every line ends in a tab and a number."""
    parts = [line.rpartition(LABEL_SEPARATOR) for line in lines]
    if not all(text and label.isascii() and label.isdigit() and len(label) < 7 for text, _, label in parts):
        return lines, None
    labels = torch.tensor([int(label) for _, _, label in parts], dtype=torch.int64, device="cpu")
    return [text for text, _, _ in parts], labels
