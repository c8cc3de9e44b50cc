"""Tiny language models of transformers with random weights, and a folder of one with a tokenizer and text."""

from pathlib import Path
from typing import Any

import pytest
import torch

N_TOKENS, LENGTH = 53, 32
SIZES = {
    "vocab_size": N_TOKENS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": LENGTH,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": False},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": N_TOKENS},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "Gemma3": {"head_dim": 8, "sliding_window": 8},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def language_model(kind: str, **more: Any) -> Any:
    """A causal language model of this kind, in eval mode, the same every time."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    torch.manual_seed(0)
    sizes = {**KINDS[kind], "bos_token_id": 1, "eos_token_id": 2} if kind == "GPT2" else {**SIZES, **KINDS[kind]}
    return model(config(**{**sizes, **more})).eval()


def sequences(n: int = 12, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, N_TOKENS, (n, length), generator=torch.Generator().manual_seed(seed))


def folder_of_language_model(folder: Path, kind: str = "Llama") -> Path:
    """The model with a tokenizer of whole words, as save_pretrained writes them."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, N_TOKENS))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    language_model(kind).save_pretrained(folder)
    return folder


def some_text(n_words: int, seed: int = 0) -> str:
    numbers = torch.randint(4, N_TOKENS, (n_words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in numbers.tolist())
