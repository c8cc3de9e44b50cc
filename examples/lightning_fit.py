"""Prune the net of a LightningModule and train it with `Trainer`: one callback holds the zeros. Needs Lightning.

python examples/lightning_fit.py
"""

import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import sipp

try:
    import pytorch_lightning as L  # or, as you have it: import lightning.pytorch as L

    from sipp.integrations.lightning import HoldMasks
except ImportError as missing:
    raise SystemExit(f"skipped: {missing}; pip install pytorch-lightning") from missing


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


torch.manual_seed(0)
x = torch.randn(256, 16)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32)
module = Module()
pruned = sipp.prune(module.net, x, keep=0.2)
module.net.load_state_dict(pruned.model.state_dict())
quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
with tempfile.TemporaryDirectory() as folder:
    options = {"max_epochs": 3, "accelerator": "cpu", "default_root_dir": folder} | quiet
    L.Trainer(callbacks=[HoldMasks(pruned, part="net")], **options).fit(module, loader)

n_nonzero = sum(int(module.net.get_parameter(name).count_nonzero()) for name in pruned.masks)
print(f"{n_nonzero:,} of {pruned.n_weights:,} prunable weights are not zero after training with Lightning")
assert n_nonzero <= pruned.kept
