"""Prune a transformer encoder's attention and feed-forward weights, leave its head, certify the output.

python examples/transformer.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sipp


class Counter(nn.Module):
    """Reads a sequence of bits, says how many are set."""

    def __init__(self, length: int = 24, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, length + 1)

    def forward(self, bits: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(bits) + self.place).mean(1))


torch.manual_seed(0)
net = Counter()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(100):
    bits = torch.randint(0, 2, (64, 24))
    optimizer.zero_grad()
    F.cross_entropy(net(bits), bits.sum(1)).backward()
    optimizer.step()

calibration, holdout = torch.randint(0, 2, (200, 24)), torch.randint(0, 2, (500, 24))
pruned = sipp.prune(net, calibration, keep=0.7, method="magnitude", exclude="head")
print(pruned.sheet.title)  # print(pruned) has a table

# The holdout must be new: points that are in the calibration data too are refused.
certificate = sipp.certify(net, pruned.model, holdout, share=0.05, confidence=0.95, calibration=calibration)
print(certificate.sentence)
