"""Prune an LSTM on a task that needs memory: both of its matrices are scored, and every time step is a patch.

python examples/lstm.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sipp


class Recall(nn.Module):
    """Reads a sequence, says which symbol came first."""

    def __init__(self, n_symbols: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(n_symbols, 8)  # embeddings are never pruned
        self.lstm = nn.LSTM(8, width, batch_first=True)
        self.head = nn.Linear(width, n_symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(symbols))
        return self.head(states[:, -1])


def accuracy(net: nn.Module, symbols: Tensor) -> float:
    with torch.no_grad():
        return (net(symbols).argmax(1) == symbols[:, 0]).double().mean().item()


torch.manual_seed(0)
net = Recall()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(150):
    symbols = torch.randint(0, 4, (64, 6))
    optimizer.zero_grad()
    F.cross_entropy(net(symbols), symbols[:, 0]).backward()
    optimizer.step()

calibration, test = torch.randint(0, 4, (200, 6)), torch.randint(0, 4, (1000, 6))
print(f"dense: {accuracy(net, test):.1%}")
for method in ("sipp-hybrid", "magnitude", "random"):
    pruned = sipp.prune(net, calibration, keep=0.5, method=method, include="lstm", seed=0)
    kept = ", ".join(f"{layer.name} {layer.keep:.0%}" for layer in pruned.layers)
    print(f"{method}: {accuracy(pruned.model, test):.1%} at half of the LSTM's weights ({kept})")
