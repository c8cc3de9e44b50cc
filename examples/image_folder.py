"""Prune a ResNet with images from a folder, without training: repair, certificate, a small file. Needs pillow.

python examples/image_folder.py
"""

import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset

import sipp
from sipp_lab.nets import build


class Images(Dataset):
    """Every image below a folder, 32 x 32, scaled as the network was trained on."""

    def __init__(self, folder):
        self.paths = sorted(Path(folder).rglob("*.png"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        pixels = torch.frombuffer(bytearray(Image.open(self.paths[index]).convert("RGB").tobytes()), dtype=torch.uint8)
        return (pixels.reshape(32, 32, 3).permute(2, 0, 1).float() / 255 - 0.5) / 0.25


torch.manual_seed(0)
model = build("resnet20").eval()  # your own, with its weights
with tempfile.TemporaryDirectory() as folder:
    for part, n in (("calibration", 48), ("holdout", 120)):  # your own images
        (Path(folder) / part).mkdir()
        for i in range(n):
            noise = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8)
            Image.frombytes("RGB", (32, 32), bytes(noise.flatten().tolist())).save(Path(folder) / part / f"{i:03}.png")
    calibration, holdout = Images(Path(folder) / "calibration"), Images(Path(folder) / "holdout")
    pruned = sipp.prune(model, calibration, keep=0.5, repair=True)
    print(pruned.sheet.title)
    print(sipp.certify(model, pruned.model, holdout, share=0.05, confidence=0.95, calibration=calibration).sentence)
    sipp.save(pruned, Path(folder) / "net.sipp.safetensors")
    print(f"file: {(Path(folder) / 'net.sipp.safetensors').stat().st_size:,} bytes")
