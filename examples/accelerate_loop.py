"""Prune a model and train it in an Accelerate loop: hold the masks once it is prepared. Needs accelerate.

python examples/accelerate_loop.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import sipp

try:
    from accelerate import Accelerator
except ImportError as missing:
    raise SystemExit(f"skipped: {missing}; pip install '.[train]'") from missing

torch.manual_seed(0)
x = torch.randn(256, 16)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32)
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

pruned = sipp.prune(net, x, keep=0.2)
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(pruned.model.parameters(), lr=1e-2, weight_decay=0.1)
model, prepared, loader = accelerator.prepare(pruned.model, optimizer, loader)
inside = accelerator.unwrap_model(model)  # without the wrapper of several processes
sipp.hold(inside, pruned, optimizer=optimizer)  # the plain optimizer is the one that steps
for _ in range(3):
    for inputs, labels in loader:
        prepared.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        prepared.step()
sipp.release(inside)

n_nonzero = sum(int(inside.get_parameter(name).count_nonzero()) for name in pruned.masks)
print(f"{n_nonzero:,} of {pruned.n_weights:,} prunable weights are not zero after training with Accelerate")
assert n_nonzero <= pruned.kept
