"""Prune a Hugging Face model and retrain it with `Trainer`: one callback holds the zeros. Needs transformers.

python examples/hf_trainer.py
"""

import tempfile

import torch

import sipp

try:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from sipp.integrations.hugging_face import HoldMasks
except ImportError as missing:
    raise SystemExit(f"skipped: {missing}; pip install '.[hf]'") from missing


torch.manual_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=2
)
model = BertForSequenceClassification(config)  # your own: from_pretrained(...)
tokens = torch.randint(0, 100, (256, 12))
data = [{"input_ids": row, "labels": (row[0] > 50).long()} for row in tokens]

calibration = [{"input_ids": part} for part in tokens[:192].split(32)]  # batches of keyword arguments, no labels
pruned = sipp.prune(model, calibration, keep=0.3, exclude="classifier")
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(folder, max_steps=20, report_to=[], save_strategy="no", disable_tqdm=True)
    Trainer(pruned.model, options, train_dataset=data, callbacks=[HoldMasks(pruned)]).train()

n_nonzero = sum(int(pruned.model.get_parameter(name).count_nonzero()) for name in pruned.masks)
print(f"{n_nonzero:,} of {pruned.n_weights:,} prunable weights are not zero after training")
assert n_nonzero <= pruned.kept
