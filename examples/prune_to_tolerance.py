"""Find the sparsest network whose accuracy drop is certified, write the certificate, make it again.

python examples/prune_to_tolerance.py
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import sipp
from sipp.results.jsonio import from_json, to_json
from sipp.verbs.certify import certify_accuracy
from sipp_lab.data.feed import split_images
from sipp_lab.data.sets import load_digits

digits = load_digits()
splits = split_images(digits, n_calibration=200, n_holdout=400, seed=0)
images, labels = digits.images.flatten(1), digits.labels

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(15):
    for items in splits.train[torch.randperm(len(splits.train))].split(64):
        optimizer.zero_grad()
        F.cross_entropy(net(images[items]), labels[items]).backward()
        optimizer.step()

calibration = images[splits.calibration]
holdout = [(images[part], labels[part]) for part in splits.holdout.split(100)]  # 400 points new to net and calibration
best = sipp.prune_to(net, calibration, holdout, max_accuracy_drop=0.05, confidence=0.95, method="magnitude")
print(best)  # every level that was tested, and the certificate in words

if best.certificate is None:
    raise SystemExit(3)  # not certified: `best.model` is the dense network

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "certificate.json"
    path.write_text(json.dumps(to_json(best.certificate)))
    again = certify_accuracy(net, best, holdout, confidence=0.95, calibration=calibration)
    read = from_json(type(again), json.loads(path.read_text()), path)
    print("made again: the same" if again == read else "made again: another one")
