"""CIFAR-10, in the official binary version."""

from pathlib import Path

import numpy as np
import torch

from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.published import Published

SHAPE = (3, 32, 32)
N_PER_FILE, N_TRAIN_FILES = 10_000, 5
RECORD_BYTES = 1 + 3 * 32 * 32  # one label, then the red, green and blue planes
SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10 = Published(
    name="CIFAR-10",
    command="cifar10",
    folder="cifar-10-batches-bin",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    files={name: (N_PER_FILE * RECORD_BYTES, digest) for name, digest in SHA256.items()},
)


def load_cifar10(folder: Path | str) -> ImageSet:
    """All 60,000 images as uint8, training images first, from `folder` or from the batches folder inside it."""
    return decoded(np.concatenate(list(CIFAR10.read(folder).values())))


def decoded(raw: np.ndarray) -> ImageSet:
    """The images in the bytes of the files, one after another."""
    records = raw.reshape(-1, RECORD_BYTES)
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    images = torch.from_numpy(np.ascontiguousarray(records[:, 1:])).view(-1, *SHAPE)
    n_train = len(records) * N_TRAIN_FILES // len(SHA256)
    return ImageSet("cifar10", images, labels, n_train, 10)
