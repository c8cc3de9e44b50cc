"""VGG16 with BatchNorm for 32 x 32 images (Simonyan and Zisserman 2015, configuration D) and one linear layer."""

import torch
from torch import Tensor, nn

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # a 2 x 2 max-pool ends each


class Vgg(nn.Module):
    """Logits N x n_classes for images N x 3 x 32 x 32: five poolings leave one pixel."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 3
        for stage in STAGES:
            for n_out in stage:
                layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU()]
                n_in = n_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(n_in, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))
