"""Stages checked copies of the files in a Hugging Face folder for transformers.

Many files in such a folder can make transformers load code, kernels, adapters or other folders. So only a few files are
used, each a plain file inside the folder, and any setting that refers to code or another place is refused.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from sipp.errors import ModelError

MOST_JSON = 1 << 28  # bytes; the largest tokenizer.json are near 1 << 25
CONFIG, TOKENIZER_CONFIG, TOKEN_NAMES = "config.json", "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
WEIGHTS, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model")  # one of them holds the vocabulary
BESIDE = ("merges.txt", "added_tokens.json", "bpe.codes", "*.spm")  # needed by some tokenizers too
WHOLE = "give a whole folder of save_pretrained with model.safetensors"

# Keys of config.json, at any depth, that make transformers load something from outside the folder.
ELSEWHERE = {
    "auto_map": "code of its own",
    "custom_pipelines": "code of its own",
    "quantization_config": "quantised weights, whose code comes from elsewhere",
    "compression_config": "compressed weights, whose code comes from elsewhere",
    "fusion_config": "code that changes the network",
    "kernel_config": "kernels from elsewhere",
    "use_kernels": "kernels from elsewhere",
    "distributed_config": "a cluster",
    "configuration_files": "other configurations",
    "transformers_weights": "weights under another name",
    "gguf_file": "weights in another format",
    "backbone": "another network",
    "use_pretrained_backbone": "another network",
}
IMPLEMENTATION = "_implementation"  # attn_implementation and the like may name a kernel on the hub
BUILT_IN = ("eager", "sdpa", "batched_mm", "grouped_mm")
# Where a folder came from and how to load it, which transformers might follow: dropped.
NOTES = ("name_or_path", "_name_or_path", "_commit_hash", "trust_remote_code", "local_files_only", "is_local")
LABELS = ("id2label", "label2id", "task_specific_params")  # free text that is never looked up
TOKEN = "_token"
SETTINGS = (
    "tokenizer_class",
    "padding_side",
    "truncation_side",
    "truncation_strategy",
    "errors",
)  # words that are kept
TOKENS = ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder", "never_split")


def stage_network(folder: Path, place: Path) -> None:
    """Stages the configuration and links to the weights of `folder` in the empty folder `place`."""
    stage_config(folder, place)
    if os.path.lexists(folder / GENERATION):  # kept for exported folders
        settings = _read_json(folder, GENERATION).items()
        numbers = {key: value for key, value in settings if key not in NOTES and _is_number(value)}
        (place / GENERATION).write_text(json.dumps(numbers))
    if os.path.lexists(folder / ADAPTER):
        raise ModelError(
            f"{folder} holds an adapter ({ADAPTER}), whose base network is elsewhere",
            fix="merge it into the network (merge_and_unload), and save that",
        )
    for name in _weight_files(folder, place):
        (place / name).symlink_to(plain_file(folder, name))


def stage_gguf(folder: Path, name: str, place: Path) -> None:
    """Stages a link to a GGUF file, which holds network, configuration and tokenizer."""
    (place / name).symlink_to(plain_file(folder, name))


def stage_config(folder: Path, place: Path) -> None:
    """Stages the checked configuration."""
    (place / CONFIG).write_text(json.dumps(checked_config(folder)))


def checked_config(folder: Path) -> dict[str, Any]:
    """The configuration of a folder; ModelError if it refers to code or another place."""
    return _check_config(_read_json(folder, CONFIG), folder / CONFIG, "")


def stage_tokenizer(folder: Path, place: Path) -> bool:
    """Stages the configuration and the tokenizer; False if there is no vocabulary."""
    stage_config(folder, place)
    vocabularies = [path.name for pattern in VOCABULARIES for path in sorted(folder.glob(pattern))]
    for name in vocabularies + [path.name for pattern in BESIDE for path in sorted(folder.glob(pattern))]:
        shutil.copyfile(plain_file(folder, name), place / name)
    for name in (TOKENIZER_CONFIG, TOKEN_NAMES):
        if os.path.lexists(folder / name):
            (place / name).write_text(json.dumps(_tokenizer_settings(_read_json(folder, name), folder / name)))
    return bool(vocabularies)


def plain_file(folder: Path, name: str) -> Path:
    """The real path of a file in the folder; ModelError if it is missing or outside the folder."""
    path, real = folder / name, (folder / name).resolve()
    if Path(name).name != name or not real.is_relative_to(folder.resolve()):
        raise ModelError(
            f"{path} lies outside of the folder",
            fix="copy the folder with the files that its links point to (cp -rL), and look at them",
        )
    if not real.is_file():
        raise ModelError(f"{folder} could not be loaded (no file named {name})", fix=WHOLE)
    return real


def _weight_files(folder: Path, place: Path) -> list[str]:
    """The names of the weight files; stages an index of several with nothing but the file names."""
    if os.path.lexists(folder / WEIGHTS) or not os.path.lexists(folder / INDEX):
        return [WEIGHTS]
    of_tensor = _read_json(folder, INDEX).get("weight_map")
    named = list(of_tensor.values()) if isinstance(of_tensor, dict) else []
    files = set(named) if all(isinstance(name, str) for name in named) else set()
    wrong = sorted(name for name in files if not name.endswith(".safetensors"))
    if wrong or not files:
        raise ModelError(
            f"{folder / INDEX} names {wrong[0] if wrong else 'no files'}, and only .safetensors are read", fix=WHOLE
        )
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": of_tensor}))
    return sorted(files)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    path = plain_file(folder, name)
    try:
        if path.stat().st_size > MOST_JSON:
            raise ValueError(f"more than {MOST_JSON:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{folder} could not be loaded ({name} is not valid JSON: {error!s:.200})", fix=WHOLE
        ) from error
    return content


def _check_config(config: dict[str, Any], path: Path, inside: str) -> dict[str, Any]:
    """The configuration without notes on its origin; ModelError if it refers to code or another place."""
    kept: dict[str, Any] = {}
    for key, value in config.items():
        where = f"{inside}{key}"
        if key in ELSEWHERE and value not in (None, False, {}, []):
            raise _refusal(path, where, ELSEWHERE[key])
        if IMPLEMENTATION in key and not _is_built_in(value):
            raise _refusal(path, where, f"{value!r:.60}, and only {', '.join(BUILT_IN)} are used")
        if key in LABELS:
            kept[key] = value
        elif key not in NOTES and (not key.startswith("_") or isinstance(value, int | float)):
            kept[key] = _check_value(value, path, where)
    return kept


def _is_built_in(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else [value]
    return all(
        name is None or isinstance(name, bool) or (isinstance(name, str) and name in BUILT_IN) for name in values
    )


def _check_value(value: Any, path: Path, where: str) -> Any:
    """A value of a configuration; ModelError if it may be a path."""
    if isinstance(value, dict):
        return _check_config(value, path, f"{where}.")
    if isinstance(value, list):
        return [_check_value(item, path, where) for item in value]
    if isinstance(value, str) and ("/" in value or "\\" in value) and not where.endswith(TOKEN):
        raise _refusal(path, where, f"{value!r:.60}, which may be another place")
    return value


def _tokenizer_settings(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The harmless settings of a tokenizer: numbers, tokens, and a few known words."""
    if config.get("auto_map") or config.get("custom_pipelines"):
        raise _refusal(path, "auto_map", ELSEWHERE["auto_map"])
    return {
        key: value
        for key, value in config.items()
        if key.endswith(TOKEN)
        or key in (*SETTINGS, *TOKENS)
        or (key not in NOTES and isinstance(value, int | float | None))
    }


def _is_number(value: Any) -> bool:
    """Whether this is a number, or a list of numbers."""
    return all(map(_is_number, value)) if isinstance(value, list) else isinstance(value, int | float | None)


def _refusal(path: Path, where: str, what: str) -> ModelError:
    return ModelError(
        f"{where} in {path} names {what}",
        fix=f"load it by code that you trust (--model package.module:callable), or take {where} out",
    )
