"""An LSTM that reads a sequence (for an image: its rows, top to bottom) and classifies it from the last state."""

import torch
from torch import Tensor, nn

STEP_SIZE = 8  # values per step: one row of an 8 x 8 digit
HIDDEN = 64


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


def lstm(n_classes: int) -> LstmClassifier:
    """An LSTM classifier for 8 x 8 digits with torch's own recurrent initialisation."""
    return LstmClassifier(STEP_SIZE, HIDDEN, n_classes)
