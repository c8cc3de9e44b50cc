"""LoRA on a pruned language model, and pruning while LoRA trains: adapters are masked and merged, and the zeros stay.

python examples/lora.py, with transformers and peft. LoRA adds a dense product of two thin matrices: merging it would
fill in every zero. `hold` and `gradual` mask what it adds; `release` merges the masked product into the weights.
"""

import torch

import sipp

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    raise SystemExit(f"skipped: {missing}; pip install '.[hf]' peft") from missing

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def with_adapters(model):
    """The model with LoRA around some of its layers, and a function that trains the adapters for one step."""
    net = get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS))
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)

    def train_step(step):
        optimizer.zero_grad()
        net(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return net, train_step


def told(what, model):
    """How many prunable weights are not zero; prints that and the perplexity."""
    weights = (p for name, p in model.named_parameters() if ".layers." in name and name.endswith("proj.weight"))
    n_nonzero = sum(int(weight.count_nonzero()) for weight in weights)
    found = sipp.perplexity(model, tokens, progress=False).perplexity
    print(f"{what}: perplexity {found:.1f}, {n_nonzero:,} prunable weights are not zero")
    return n_nonzero


torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()  # yours: from_pretrained(...)
tokens = torch.arange(32).repeat(16, 1).add(torch.arange(16)[:, None]) % 64

pruned = sipp.prune(model, tokens, keep=0.5, method="wanda", statements=False, progress=False)
told("pruned", pruned.model)
net, train_step = with_adapters(pruned.model)
sipp.hold(net, pruned)
for step in range(40):
    train_step(step)
sipp.release(net)
assert told("trained by LoRA and merged", net.unload().eval()) <= pruned.kept

net, train_step = with_adapters(model)
done = sipp.gradual(net, train_step, tokens, keep=0.5, steps=40, method="wanda", progress=False)
assert told("pruned little by little while LoRA trains", net.unload().eval()) <= done.kept == pruned.kept
