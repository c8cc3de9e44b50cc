"""The registry of networks: how each is built, its input shape and its default number of classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, get_args

import torch
from torch import nn

from sipp.errors import OptionError
from sipp.results import check
from sipp_lab.nets.densenet import DenseNet
from sipp_lab.nets.plain import (
    CNN5_DIGITS_POOLS,
    CNN5_POOLS,
    Cnn5,
    LstmClassifier,
    Vgg,
    digits_cnn,
    lenet5,
    lenet_300_100,
)
from sipp_lab.nets.resnet import EXPANSION, Bottleneck, CifarResNet, ImageNetResNet, WideResNet, projected_block

DIGITS, MNIST, CIFAR, IMAGENET = (1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 224, 224)
INPUT_SHAPES = {"digits": DIGITS, "mnist": MNIST, "cifar10": CIFAR, "imagenet": IMAGENET}  # by data set
Init = Literal["he", "pytorch", "fan-out"]


@dataclass(frozen=True)
class NetSpec:
    """A network: `make(n_classes)`, the shape of one input, and the default number of classes."""

    make: Callable[[int], nn.Module]
    input_shape: tuple[int, ...]
    n_classes: int = 10
    is_he: bool = True  # He initialisation; False (recurrent networks): torch's default
    linear_std: float | None = None  # of linear weights with fan-out initialisation; None: drawn as torch does


NETS: dict[str, NetSpec] = {
    "resnet20": NetSpec(partial(CifarResNet, 3), CIFAR),
    "resnet32": NetSpec(partial(CifarResNet, 5), CIFAR),
    "resnet44": NetSpec(partial(CifarResNet, 7), CIFAR),
    "resnet56": NetSpec(partial(CifarResNet, 9), CIFAR),
    "resnet110": NetSpec(partial(CifarResNet, 18), CIFAR),
    "wrn16-8": NetSpec(partial(WideResNet, 2, 8), CIFAR),
    "vgg16": NetSpec(Vgg, CIFAR, linear_std=0.01),
    "densenet22": NetSpec(partial(DenseNet, 3, 12), CIFAR),
    "cnn5": NetSpec(partial(Cnn5, 64, 3, CNN5_POOLS), CIFAR),
    "lenet-300-100": NetSpec(partial(lenet_300_100, 28), MNIST),
    "lenet-5": NetSpec(lenet5, MNIST),
    "lstm": NetSpec(partial(LstmClassifier, 8, 64), DIGITS, is_he=False),  # a step is one row of a digit
    "digits-cnn": NetSpec(digits_cnn, DIGITS),
    "digits-cnn5": NetSpec(partial(Cnn5, 16, 1, CNN5_DIGITS_POOLS), DIGITS),
    "digits-fc": NetSpec(partial(lenet_300_100, 8), DIGITS),
    "resnet18": NetSpec(partial(ImageNetResNet, projected_block, 1, (2, 2, 2, 2)), IMAGENET, 1000),
    "resnet34": NetSpec(partial(ImageNetResNet, projected_block, 1, (3, 4, 6, 3)), IMAGENET, 1000),
    "resnet50": NetSpec(partial(ImageNetResNet, Bottleneck, EXPANSION, (3, 4, 6, 3)), IMAGENET, 1000),
    "resnet101": NetSpec(partial(ImageNetResNet, Bottleneck, EXPANSION, (3, 4, 23, 3)), IMAGENET, 1000),
}


def net_spec(name: str) -> NetSpec:
    """The entry of `NETS` with this name; the error for an unknown name suggests the nearest."""
    if name in NETS:
        return NETS[name]
    raise OptionError(f"unknown network {name!r}{check.nearest(name, NETS)}", fix=f"known: {', '.join(NETS)}")


def n_classes_in(name: str, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The number of classes of a network whose tensors have these shapes; None if they do not tell.

    It is the number of rows of the last tensor with two or more dimensions, the classifier.
    """
    shape = tuple(shapes.get(_last_layer(name), ()))
    return int(shape[0]) if len(shape) >= 2 and shape[0] else None


@cache
def _last_layer(name: str) -> str:
    with torch.device("meta"):
        return [key for key, value in build(name).state_dict().items() if value.dim() >= 2][-1]


def build(name: str, *, n_classes: int | None = None, init: Init = "he") -> nn.Module:
    """A freshly initialised network in train mode; `n_classes` defaults to that of its data set.

    `init`: "he" for He initialisation, "fan-out" for that of the paper's authors, "pytorch" for the default of torch's
    layers. Weights come from torch's global generator: call `torch.manual_seed` first to fix them.
    """
    spec = net_spec(name)
    n_outputs = spec.n_classes if n_classes is None else n_classes
    if isinstance(n_outputs, bool) or not isinstance(n_outputs, int) or n_outputs < 1:
        raise OptionError(f"n_classes for {name!r} must be a whole number of at least 1, not {n_classes!r}")
    check.choice("init", init, get_args(Init))
    net = spec.make(n_outputs)
    if spec.is_he and init != "fan-out":  # also before "pytorch", whose published runs drew twice
        initialise(net, "he")
    if init != "he":
        initialise(net, init, linear_std=spec.linear_std)
    return net


def initialise(net: nn.Module, init: Init, *, linear_std: float | None = None) -> None:
    """Draws all convolution and linear weights anew, from torch's global generator; norms keep scale 1 and shift 0.

    "he": N(0, 2 / fan_in), biases 0. "pytorch": as torch's constructors, uniform in +-1/sqrt(fan_in), biases too, a
    sixth of the variance. "fan-out": convolutions N(0, 2 / fan_out), biases 0; linear layers as torch, or N(0,
    linear_std^2). The paper does not print that; its authors' program does it. Magnitude then removes the classifier of
    ResNet20 first, because convolutions have larger weights.
    """
    for module in net.modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        is_normal = init == "he" or (init == "fan-out" and isinstance(module, nn.Conv2d))
        if is_normal:
            mode: Literal["fan_in", "fan_out"] = "fan_in" if init == "he" else "fan_out"
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
        else:
            module.reset_parameters()
            if init == "fan-out" and linear_std is not None:
                nn.init.normal_(module.weight, std=linear_std)
                is_normal = True
        if is_normal and module.bias is not None:
            nn.init.zeros_(module.bias)
