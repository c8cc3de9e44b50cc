"""An audio network: an LSTM over frames of a spectrogram, of different lengths, pruned to a certified accuracy drop.

python examples/paths/audio_lstm.py
"""

import torch
import torch.nn.functional as F

import sipp

N_MELS, N_FRAMES, N_WORDS = 20, 24, 4


class KeywordSpotter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(N_MELS, 32, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(32, N_WORDS)

    def forward(self, frames):  # points x frames x mels
        states, _ = self.lstm(frames)
        return self.head(states[:, -1])


def recordings(n):
    """Spectrograms of n rising or falling tones in noise, and which of the words each is: yours come from files."""
    word = torch.randint(0, N_WORDS, (n,))
    time = torch.linspace(0, 1, N_FRAMES)
    pitch = 4 + 3 * word[:, None] + 4 * time * (1 - 2 * (word[:, None] % 2))
    pitch = pitch + torch.randn(n, 1)
    tone = torch.exp(-(torch.arange(N_MELS) - pitch[:, :, None]).square() / 4)
    return (tone + 0.1 * torch.randn(n, N_FRAMES, N_MELS)).clamp(min=0).log1p(), word


torch.manual_seed(0)
net = KeywordSpotter()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
for _ in range(60):
    frames, words = recordings(64)
    optimizer.zero_grad()
    F.cross_entropy(net(frames), words).backward()
    optimizer.step()

calibration, _ = recordings(300)
frames, words = recordings(1000)
holdout = [(frames, words)]
best = sipp.prune_to(net, calibration, holdout, max_accuracy_drop=0.05, confidence=0.95, include="lstm")
print(best)
sipp.save(best.pruned, "spotter.sipp.safetensors", certificate=best.certificate)
print(sipp.inspect("spotter.sipp.safetensors"))
print(sipp.page(best.pruned, best.certificate, path="page.html", force=True))
