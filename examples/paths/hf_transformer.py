"""A Hugging Face transformer: pruned, retrained with the Trainer, certified, written as a folder, loaded again.

python examples/paths/hf_transformer.py FOLDER TRAIN NEW: a folder of `save_pretrained`, and text, each line a sentence,
a tab and the number of its class.
"""

import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

import sipp
from sipp.integrations.hugging_face import HoldMasks


def batches_of(path, tokenizer):
    """Batches of keyword arguments with their labels, as the model is called."""
    lines = [line.rpartition("\t") for line in Path(path).read_text().splitlines()]
    found = []
    for start in range(0, len(lines), 50):
        part = lines[start : start + 50]
        batch = dict(tokenizer([text for text, _, _ in part], padding=True, return_tensors="pt"))
        found.append(batch | {"labels": torch.tensor([int(label) for _, _, label in part])})
    return found


def points_of(batches):
    return [
        {name: tensor[i] for name, tensor in batch.items()} for batch in batches for i in range(len(batch["labels"]))
    ]


folder, train, new = sys.argv[1:]
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
calibration, holdout = batches_of(train, tokenizer), batches_of(new, tokenizer)
first, second = holdout[::2], holdout[1::2]  # new inputs for each claim

pruned = sipp.prune(model, calibration, keep=0.5, exclude="classifier", repair=True)
print(pruned)
print(sipp.certify(model, pruned.model, first, output="logits", calibration=calibration).sentence)

options = TrainingArguments("out", max_steps=10, report_to=[], save_strategy="no", disable_tqdm=True)
data = points_of(calibration)
trainer = Trainer(pruned.model, options, train_dataset=data, callbacks=[HoldMasks(pruned)], processing_class=tokenizer)
trainer.train()

certificate = sipp.certify_accuracy(model, pruned.model.eval(), second, output="logits")
print(certificate.sentence)
assessed = sipp.assess(model, pruned.model, calibration)
sipp.save_folder(assessed, "assessed", certificate=certificate)
print(sipp.page(assessed, certificate, path="page.html", force=True))
print(sipp.export(pruned, "sparse"))
tokenizer.save_pretrained("sparse")
again = AutoModelForSequenceClassification.from_pretrained("sparse")
n_nonzero = sum(int(again.get_parameter(name).count_nonzero()) for name in pruned.masks)
print(f"{n_nonzero:,} of {pruned.n_weights:,} prunable weights are not zero in the folder")
