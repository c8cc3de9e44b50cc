"""Loads Hugging Face folders as networks, and text files as inputs: `--model hf:DIR --data sentences.txt`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor, nn

from sipp.cli.hugging_face_files import CONFIG, VOCABULARIES, WHOLE, stage_gguf, stage_network, stage_tokenizer
from sipp.errors import DataError, ModelError, OptionError, SippError
from sipp.extras import needed_for
from sipp.records.display import listed

PREFIX, GGUF = "hf:", ".gguf"
MOST_TEXT = 1 << 28  # bytes of a text file, since it is held in memory
MOST_TOKENS = 512  # per sentence
OWN_CODE_ONLY = {"local_files_only": True, "trust_remote_code": False}
LABEL_SEPARATOR = "\t"


def folder_of(spec: str) -> Path:
    """The folder of `hf:DIR`, which must hold a config.json or one GGUF file; nothing is downloaded."""
    folder = Path(spec.removeprefix(PREFIX))
    if not (folder / CONFIG).is_file() and gguf_in(folder) is None:
        raise OptionError(
            f"{folder} is not a folder of a Hugging Face model (no config.json, no single .gguf file)",
            fix="give hf:DIR, a folder that save_pretrained wrote; nothing is downloaded",
        )
    return folder


def gguf_in(folder: Path) -> str | None:
    """The only GGUF file in a folder without config.json; None if there are none or several."""
    if (folder / CONFIG).is_file() or not folder.is_dir():
        return None
    names = sorted(path.name for path in folder.glob(f"*{GGUF}"))
    return names[0] if len(names) == 1 else None


def hf_model(spec: str) -> nn.Module:
    """Loads the network of a folder from safetensors, with the class named in its configuration; runs no code."""
    transformers = _transformers("--model hf:DIR", spec)
    folder = folder_of(spec)
    with _staging_folder(folder) as place:
        file = gguf_in(folder)
        if file is None:
            stage_network(folder, Path(place))
            network, loading_info = _load(transformers, place)
        else:
            stage_gguf(folder, file, Path(place))
            network, loading_info = _from_gguf(transformers, place, file), {"missing_keys": [], "unexpected_keys": []}
    network.config._name_or_path = str(folder)
    missing, unknown = (sorted(loading_info[key]) for key in ("missing_keys", "unexpected_keys"))
    if missing:  # transformers would initialise these at random
        raise ModelError(f"{folder} has no weights for {listed(missing)} of {type(network).__name__}", fix=WHOLE)
    if unknown:
        warnings.warn(f"{folder}: {type(network).__name__} has no place for {listed(unknown)}, left out", stacklevel=2)
    return cast("nn.Module", network)


def hf_model_without_weights(spec: str) -> nn.Module:
    """The network of a folder on the meta device, without its weights."""
    transformers = _transformers("--model hf:DIR", spec)
    with needed_for("reading a network without its weights"):
        from accelerate import init_empty_weights
    folder = folder_of(spec)
    if gguf_in(folder) is not None:
        raise ModelError(
            f"{folder} holds a GGUF file, and only .safetensors are read block by block",
            fix="convert it: load it with transformers, and save_pretrained",
        )
    with _staging_folder(folder) as place:
        stage_network(folder, Path(place))  # refuses anything but plain weights in this folder
        config, kind = _model_class(transformers, place)
        with init_empty_weights():
            is_any = kind is transformers.AutoModel
            network = kind.from_config(config, trust_remote_code=False) if is_any else kind(config)
    return cast("nn.Module", network.eval())


@contextmanager
def _staging_folder(folder: Path) -> Iterator[str]:
    """A temporary folder for staged files; whatever transformers raises becomes a ModelError."""
    try:
        with TemporaryDirectory() as place:
            yield place
    except SippError:
        raise
    except Exception as error:  # a broken folder may raise anything
        reason = f"{type(error).__name__}: {error!s:.200}"
        if "ignore_mismatched_sizes" in reason:  # this advice does not apply
            reason = "the shapes in its config.json and in its weights differ"
        raise ModelError(f"{folder} could not be loaded ({reason})", fix=WHOLE) from error


def _transformers(purpose: str, spec: str) -> Any:
    """Imports transformers, offline, and without importing modules from the model's folder."""
    folder = Path(spec.removeprefix(PREFIX)).resolve()
    if (folder / CONFIG).is_file():
        sys.path[:] = [place for place in sys.path if Path(place).resolve() != folder]
    os.environ["HF_HUB_OFFLINE"] = "1"  # read on import
    with needed_for(purpose):
        import transformers
        from huggingface_hub import constants
    constants.HF_HUB_OFFLINE = True  # if it was imported before
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # we report problems ourselves
    return transformers


def _load(transformers: Any, place: str) -> tuple[Any, dict[str, Any]]:
    """The network of a staged folder, and its missing and unexpected weights."""
    config, kind = _model_class(transformers, place)
    loaded: tuple[Any, dict[str, Any]] = kind.from_pretrained(
        place, config=config, use_safetensors=True, output_loading_info=True, **OWN_CODE_ONLY
    )
    return loaded


def _model_class(transformers: Any, place: str) -> tuple[Any, Any]:
    """The configuration of a staged folder, and the model class it names."""
    config = transformers.AutoConfig.from_pretrained(place, **OWN_CODE_ONLY)
    names = getattr(config, "architectures", None) or [""]
    kind: Any = getattr(transformers, names[0], None)
    is_fit = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_fit or not isinstance(config, kind.config_class or ()):
        kind = transformers.AutoModel
    return config, kind


def _from_gguf(transformers: Any, place: str, file: str) -> Any:
    """Loads the network of a GGUF file, dequantised to float32."""
    with needed_for("reading GGUF files"):
        import gguf  # noqa: F401
    read = transformers.AutoModelForCausalLM.from_pretrained(
        place, gguf_file=file, dtype=torch.float32, **OWN_CODE_ONLY
    )
    config = read.config
    if hasattr(config, "quantization_config"):  # no longer quantised
        del config.quantization_config
    network = type(read)(config)
    network.load_state_dict(read.state_dict())
    return network.eval()


def tokenizer_of(spec: str) -> Any:
    """The tokenizer of `hf:DIR`."""
    folder = folder_of(spec)
    return _load_tokenizer(_transformers("text as data", spec), folder)[0]


def own_tokenizer(spec: str) -> Any:
    """The tokenizer inside a GGUF file; None for other networks, whose folder has separate files for it."""
    is_gguf = spec.startswith(PREFIX) and gguf_in(Path(spec.removeprefix(PREFIX))) is not None
    return tokenizer_of(spec) if is_gguf else None


def sentences(path: Path, model: str) -> dict[str, Tensor]:
    """Tokenizes the lines of a text file; `sentence<TAB>number` gives labels too."""
    if not model.startswith(PREFIX):
        raise DataError(
            f"{path.name} holds text, and {model or 'the network'} has no tokenizer", fix="give --model hf:DIR"
        )
    transformers = _transformers("text files as data", model)
    folder = folder_of(model)
    if path.stat().st_size > MOST_TEXT:
        raise DataError(f"{path} has more than {MOST_TEXT:,} bytes", fix="split it")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        texts, labels = _split_labels([line for line in lines if line])
        if not texts:
            raise DataError(f"{path} holds no sentences", fix="give one sentence per line")
        tokenizer, longest = _load_tokenizer(transformers, folder)
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        _warn_of_unknown(tokens["input_ids"], tokenizer, path)
    except SippError:
        raise
    except Exception as error:  # not text, or a broken tokenizer
        raise DataError(
            f"{path} could not be read with the tokenizer of {folder} ({type(error).__name__})",
            fix="give UTF-8 text, one sentence per line, and a folder that holds its tokenizer",
        ) from error
    return dict(tokens) | ({} if labels is None else {"labels": labels})


def _load_tokenizer(transformers: Any, folder: Path) -> tuple[Any, int]:
    """The tokenizer of a folder, and the maximum number of tokens per sentence."""
    file = gguf_in(folder)
    if file is not None:
        with needed_for("reading GGUF files"):
            import gguf  # noqa: F401
        with TemporaryDirectory() as staged:
            stage_gguf(folder, file, Path(staged))
            return transformers.AutoTokenizer.from_pretrained(staged, gguf_file=file, **OWN_CODE_ONLY), MOST_TOKENS
    with TemporaryDirectory() as staged:
        if not stage_tokenizer(folder, Path(staged)):  # transformers would create an empty one
            raise DataError(
                f"{folder} holds no tokenizer ({', '.join(VOCABULARIES)})",
                fix="save it there: tokenizer.save_pretrained",
            )
        config = transformers.AutoConfig.from_pretrained(staged, **OWN_CODE_ONLY)
        tokenizer = transformers.AutoTokenizer.from_pretrained(staged, config=config, **OWN_CODE_ONLY)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    max_positions = getattr(config, "max_position_embeddings", None)
    if isinstance(max_positions, int) and max_positions > 0:
        return tokenizer, min(max_positions, MOST_TOKENS)
    return tokenizer, MOST_TOKENS


def _warn_of_unknown(ids: Tensor, tokenizer: Any, path: Path) -> None:
    """Warns if the tokenizer does not know most words, which would make all inputs alike."""
    special = torch.tensor([i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id], device="cpu")
    words = ids[~torch.isin(ids, special)]
    share = float((words == tokenizer.unk_token_id).float().mean()) if tokenizer.unk_token_id is not None else 0.0
    if share > 0.5:
        warnings.warn(f"{path.name}: the tokenizer does not know {share:.0%} of the words", stacklevel=2)


def _split_labels(lines: list[str]) -> tuple[list[str], Tensor | None]:
    """The sentences and, if every line ends in a tab and a number, their labels."""
    parts = [line.rpartition(LABEL_SEPARATOR) for line in lines]
    fits = [bool(text) and label.isascii() and label.isdigit() and len(label) < 7 for text, _, label in parts]
    if not all(fits):
        if any(fits):  # otherwise numbers would be read as words
            raise DataError(
                f"only {sum(fits)} of {len(fits)} sentences end in a tab and a class number; the first without is "
                f"sentence {fits.index(False) + 1}",
                fix="give all of them a class number (0, 1, ...), or none",
            )
        return lines, None
    labels = torch.tensor([int(label) for _, _, label in parts], dtype=torch.int64, device="cpu")
    return [text for text, _, _ in parts], labels
