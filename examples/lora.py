"""LoRA on a pruned language model: adapters are trained under the masks and merged back, and the zeros stay.

python examples/lora.py, with transformers and peft. By itself LoRA adds a dense product of two thin matrices: merged it
would fill every zero. Here what is added is masked, while it is trained and when it is merged.
"""

from functools import partial

import torch
import torch.nn.functional as F

import sipp

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    raise SystemExit(f"skipped: {missing}; pip install 'sipp[hf]' peft") from missing


def hold_adapters(net, masks):
    """Masks what the adapters of a peft model add to pruned weights; merge_and_unload gives the same then."""
    for name, layer in net.named_modules():
        mask = masks.get(f"{name.removeprefix('base_model.model.')}.weight")
        if mask is not None and hasattr(layer, "get_delta_weight"):
            layer.get_delta_weight = partial(lambda add, mask, of: add(of) * mask, layer.get_delta_weight, mask)
            layer.forward = partial(run_masked, layer)


def run_masked(layer, inputs):
    added = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
    return F.linear(inputs, layer.base_layer.weight + added, layer.base_layer.bias)


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()  # yours: from_pretrained(...)
tokens = torch.arange(32).repeat(16, 1).add(torch.arange(16)[:, None]) % 64

pruned = sipp.prune(model, tokens, keep=0.5, method="wanda", statements=False, progress=False)
print(f"pruned: perplexity {sipp.perplexity(pruned, tokens, progress=False).perplexity:.1f}")
net = get_peft_model(
    pruned.model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
)
hold_adapters(net, pruned.masks)
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
for _ in range(40):
    optimizer.zero_grad()
    net(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
expected = net(tokens).logits
merged = net.merge_and_unload().eval()
assert torch.allclose(merged(tokens).logits, expected, atol=1e-4)
print(f"trained by LoRA, merged: perplexity {sipp.perplexity(merged, tokens, progress=False).perplexity:.1f}")
n_nonzero = sum(int(merged.get_parameter(name).count_nonzero()) for name in pruned.masks)
print(f"{n_nonzero:,} of {pruned.n_weights:,} prunable weights are not zero after LoRA")
assert n_nonzero <= pruned.kept
