"""Lightning, stopped and resumed: pruned weights stay zero throughout, and the masks travel in the checkpoint.

python examples/paths/training_frameworks.py
"""

import pytorch_lightning as L  # or, as you have it: import lightning.pytorch as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import sipp
from sipp.integrations.lightning import HoldMasks


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)


def trainer(epochs, *callbacks):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=list(callbacks), **quiet)


L.seed_everything(0)
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(labels))
images, labels = images[order], labels[order]
loader = DataLoader(TensorDataset(images[:1000], labels[:1000]), batch_size=50, shuffle=True)
new = [(images[1000:], labels[1000:])]  # never trained on

dense = Module()
trainer(4).fit(dense, loader)

# prune, then train on with the masks held; stop after two epochs
pruned = sipp.prune(dense.net, images[:400], keep=0.1)
module = Module()
module.net.load_state_dict(pruned.model.state_dict())
first = trainer(2, HoldMasks(pruned, part="net"))
first.fit(module, loader)
first.save_checkpoint("stopped.ckpt")

# another day: a new process builds the module and resumes; the masks come from the checkpoint
resumed = Module()
trainer(4, HoldMasks(part="net")).fit(resumed, loader, ckpt_path="stopped.ckpt")
n_nonzero = sum(int(resumed.net.get_parameter(name).count_nonzero()) for name in pruned.masks)
print(f"{n_nonzero:,} of {pruned.n_weights:,} prunable weights are not zero after the resumed training")

certificate = sipp.certify_accuracy(dense.net, resumed.net, new, calibration=images[:1000])
print(certificate.sentence)
trained = sipp.assess(dense.net, resumed.net, images[:400])  # training moved the weights: what holds now
print(sipp.save(trained, "net.sipp.safetensors", certificate=certificate))
sipp.page(trained, certificate, path="page.html", force=True)
