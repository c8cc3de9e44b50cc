"""An LSTM that reads a sequence (for an image: its rows, top to bottom) and classifies it from the last state."""

import torch
from torch import Tensor, nn


class LstmClassifier(nn.Module):
    """Logits N x n_classes for sequences N x T x step_size, or for images N x 1 x T x step_size."""

    def __init__(self, step_size: int, hidden: int, n_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(step_size, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.flatten(x, 1, -2)  # N x T x step_size; leaves a plain sequence as it is
        states = self.lstm(steps)[0]
        return self.linear(states[:, -1])
