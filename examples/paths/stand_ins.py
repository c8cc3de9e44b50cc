"""Creates small sample files in place of your own, for trying out the scripts in this folder.

python examples/paths/stand_ins.py, in an empty folder: my.py, my.pt, points.npz, new.npz; pets/, new-pets/,
pets.pt; and bert/, train.txt, new.txt if transformers is installed.
"""

import importlib.util
import runpy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits

from sipp_lab.data.images import MEAN, STD, normalise
from sipp_lab.nets import build

MY_PY = """import torch


def net():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    )
"""
WORDS = [
    "the",
    "a",
    "film",
    "story",
    "plot",
    "was",
    "very",
    "not",
    "long",
    "one",
    "of",
    "and",
    "but",
    "bad",
    "dull",
    "good",
]
LIKED = {"good", "long"}


def a_trained_network(n_train: int = 1000) -> None:
    """my.py, its trained weights, and digits it was trained on and not."""
    Path("my.py").write_text(MY_PY)
    net = runpy.run_path("my.py")["net"]()
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (pixels[order] / 8 - 1).astype(np.float32).reshape(-1, 1, 8, 8), labels[order]
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(3):
        for start in range(0, n_train, 50):
            x, y = (torch.from_numpy(part[start : start + 50]) for part in (images, labels))
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    torch.save(net.state_dict(), "my.pt")
    np.savez("points.npz", inputs=images[:n_train], labels=labels[:n_train])
    np.savez("new.npz", inputs=images[n_train:], labels=labels[n_train:])


def folders_of_images(n_train: int = 40, n_new: int = 50) -> None:
    """pets/ and new-pets/ with a folder of pictures for each of two classes, and a ResNet20 that tells them apart."""
    pixels, labels = load_digits(return_X_y=True)
    large = np.kron(pixels.reshape(-1, 8, 8), np.ones((2, 2)))  # 16 x 16
    pictures = np.repeat((15 * large).astype(np.uint8)[..., None], 3, axis=-1)
    chosen = {name: pictures[labels == digit] for digit, name in enumerate(("cats", "dogs"))}
    for folder, first, last in (("pets", 0, n_train), ("new-pets", n_train, n_train + n_new)):
        for name, found in chosen.items():
            (Path(folder) / name).mkdir(parents=True)
            for i in range(first, last):
                Image.fromarray(found[i]).save(Path(folder) / name / f"{i}.png")
    net = build("resnet20", n_classes=2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    images = np.concatenate([found[:n_train] for found in chosen.values()])
    x = normalise(torch.from_numpy(images).permute(0, 3, 1, 2), mean=MEAN, std=STD)
    y = torch.arange(2).repeat_interleave(n_train)
    for _ in range(12):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    torch.save(net.state_dict(), "pets.pt")


def a_folder_of_hugging_face(n_train: int = 200, n_new: int = 120) -> None:
    """bert/ as save_pretrained writes it, with random weights and a vocabulary of a few words, and sentences."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    Path("bert").mkdir()
    Path("bert/vocab.txt").write_text("\n".join(words))
    BertTokenizer("bert/vocab.txt").save_pretrained("bert")
    config = BertConfig(
        vocab_size=len(words), max_position_embeddings=16, hidden_size=16, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_labels=2,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained("bert")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(4, 12))) for _ in range(2 * (n_train + n_new))]
    lines = [f"{text}\t{int(bool(LIKED & set(text.split())))}" for text in dict.fromkeys(texts)]
    Path("train.txt").write_text("\n".join(lines[:n_train]))
    Path("new.txt").write_text("\n".join(lines[n_train : n_train + n_new]))


if __name__ == "__main__":
    torch.manual_seed(0)
    a_trained_network()
    print("my.py, my.pt, points.npz, new.npz: a network that reads digits, and its data")
    folders_of_images()
    print("pets/, new-pets/, pets.pt: folders of images, and a network for them")
    if importlib.util.find_spec("transformers") is not None:
        a_folder_of_hugging_face()
        print("bert/, train.txt, new.txt: a Hugging Face model, and sentences")
