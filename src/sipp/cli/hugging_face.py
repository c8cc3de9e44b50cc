"""Hugging Face folders: loads network and tokenizer of `--model hf:DIR`, offline and without its code; uploads one."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn

from sipp.errors import DataError, ModelError, OptionError, SippError
from sipp.extras import needed_for
from sipp.results import words

PREFIX, CONFIG = "hf:", "config.json"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")  # one of them holds the vocabulary
WHOLE = "give a whole folder of save_pretrained with model.safetensors"
OWN_CODE_ONLY = {"local_files_only": True, "trust_remote_code": False}


def folder_of(spec: str) -> Path:
    """The folder of `hf:DIR`, which must have a config.json; nothing is downloaded."""
    folder = Path(spec.removeprefix(PREFIX))
    if not (folder / CONFIG).is_file():
        raise OptionError(
            f"{folder} is not a folder of a Hugging Face model (no config.json)",
            fix="give hf:DIR, a folder that save_pretrained wrote; nothing is downloaded",
        )
    return folder


def config_of(spec: str) -> dict[str, Any]:
    """The configuration of `hf:DIR`."""
    path = folder_of(spec) / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"is not valid JSON ({error!s:.200})", where=path, fix=WHOLE) from error
    return config


def hf_model(spec: str) -> nn.Module:
    """Loads the network of a folder from safetensors, with the class named in its configuration; runs no code."""
    transformers, folder = _transformers("--model hf:DIR"), folder_of(spec)
    with _loading(folder):
        config, kind = _model_class(transformers, folder)
        network, loading_info = kind.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, **OWN_CODE_ONLY
        )
    missing, unknown = (sorted(loading_info[key]) for key in ("missing_keys", "unexpected_keys"))
    if missing:  # transformers would initialise these at random
        raise ModelError(f"{folder} has no weights for {words.listed(missing)} of {type(network).__name__}", fix=WHOLE)
    if unknown:
        warnings.warn(
            f"{folder}: {type(network).__name__} has no place for {words.listed(unknown)}, left out", stacklevel=2
        )
    return cast("nn.Module", network)


def hf_model_without_weights(spec: str) -> nn.Module:
    """The network of a folder on the meta device, without its weights."""
    with needed_for("reading a network without its weights"):
        from accelerate import init_empty_weights
    transformers, folder = _transformers("--model hf:DIR"), folder_of(spec)
    with _loading(folder):
        config, kind = _model_class(transformers, folder)
        with init_empty_weights():
            is_any = kind is transformers.AutoModel
            network = kind.from_config(config, trust_remote_code=False) if is_any else kind(config)
    return cast("nn.Module", network.eval())


def tokenizer_of(spec: str) -> Any:
    """The tokenizer of `hf:DIR`."""
    transformers, folder = _transformers("text as data"), folder_of(spec)
    if not any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        raise DataError(  # transformers would create an empty one
            f"{folder} contains no tokenizer ({', '.join(VOCABULARIES)})",
            fix="save it there: tokenizer.save_pretrained",
        )
    with _loading(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, **OWN_CODE_ONLY)


def upload(folder: Path, name: str) -> str:
    """Uploads a folder to the repository USER/NAME of the hub, which is private if it is new; returns its address."""
    with needed_for("--push"):
        from huggingface_hub import HfApi, constants
    constants.HF_HUB_OFFLINE = False  # on since hf:DIR was read
    try:
        api = HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # no login, no network, or no such name
        raise OptionError(
            f"{folder} is written, but could not be uploaded ({type(error).__name__}: {error!s:.200})",
            fix=f"log in with `hf auth login`, then: hf upload {name} {folder}",
        ) from error
    return str(address)


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """A context in which whatever transformers raises becomes a ModelError."""
    try:
        yield
    except SippError:
        raise
    except Exception as error:  # a broken folder may raise anything
        reason = f"{type(error).__name__}: {error!s:.200}"
        if "ignore_mismatched_sizes" in str(error):  # this advice does not apply
            reason = "the shapes in its config.json and in its weights differ"
        if "trust_remote_code" in str(error):  # nor does this one
            reason = "it needs code of its own, which is never run; load it by code that you trust"
        raise ModelError(f"{folder} could not be loaded ({reason})", fix=WHOLE) from error


def _transformers(purpose: str) -> Any:
    """Imports transformers, offline."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read on import
    with needed_for(purpose):
        import transformers
        from huggingface_hub import constants
    constants.HF_HUB_OFFLINE = True  # if it was imported before
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # we report problems ourselves
    return transformers


def _model_class(transformers: Any, folder: Path) -> tuple[Any, Any]:
    """The configuration of a folder, and the model class it names."""
    config = transformers.AutoConfig.from_pretrained(folder, **OWN_CODE_ONLY)
    names = getattr(config, "architectures", None) or [""]
    kind: Any = getattr(transformers, names[0], None)
    is_fit = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_fit or not isinstance(config, kind.config_class or ()):
        kind = transformers.AutoModel
    return config, kind
