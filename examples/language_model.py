"""Prune a causal language model and train it further with `Trainer`: the zeros stay. Needs transformers.

python examples/language_model.py
"""

import tempfile
from pathlib import Path

import torch

import sipp

try:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from sipp.integrations.hugging_face import HoldMasks
except ImportError as missing:
    raise SystemExit(f"skipped: {missing}; pip install '.[hf]'") from missing

LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"


def tokenizer(text):  # yours: AutoTokenizer.from_pretrained(folder)
    return {"input_ids": [LETTERS.index(one) for one in text]}


def trained(net, data, n_steps, *callbacks):
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=n_steps, learning_rate=3e-3, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        points = [{"input_ids": row, "labels": row} for row in data]
        Trainer(net, options, train_dataset=points, callbacks=list(callbacks)).train()
    return net.eval()


torch.manual_seed(0)
text = "the cat sat on the mat. the dog sat on the log. " * 60
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "text.txt"
    file.write_text(text)
    windows = sipp.text(file, tokenizer, length=32)
config = LlamaConfig(
    vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32,
)  # fmt: skip
model = trained(LlamaForCausalLM(config), windows, 60)  # yours: AutoModelForCausalLM.from_pretrained(folder)

pruned = sipp.prune(model, windows, keep=0.3, method="wanda", statements=False, progress=False)
print(f"pruned: {sipp.perplexity(pruned, windows, dense=model, progress=False)}")
trained(pruned.model, windows, 30, HoldMasks(pruned))
print(f"trained further: {sipp.perplexity(pruned.model, windows, dense=model, progress=False)}")
n_nonzero = sum(int(pruned.model.get_parameter(name).count_nonzero()) for name in pruned.masks)
print(f"{n_nonzero:,} of {pruned.n_weights:,} prunable weights are not zero after training")
assert n_nonzero <= pruned.kept
