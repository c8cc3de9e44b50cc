"""Networks by name: what each is built from, which images it takes, how many classes it knows by default."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

from torch import nn

from sipp.errors import OptionError
from sipp.experiments.nets.cifar_resnet import cifar_resnet
from sipp.experiments.nets.cnn5 import cnn5, digits_cnn5
from sipp.experiments.nets.densenet import densenet
from sipp.experiments.nets.digits_cnn import digits_cnn
from sipp.experiments.nets.imagenet_resnet import imagenet_resnet
from sipp.experiments.nets.init import Init, torch_init_
from sipp.experiments.nets.lenet import digits_fc, lenet5, lenet_300_100
from sipp.experiments.nets.lstm import lstm
from sipp.experiments.nets.vgg import vgg16_bn
from sipp.experiments.nets.wide_resnet import wide_resnet
from sipp.records.checking import check_choice

CIFAR = (3, 32, 32)
IMAGENET = (3, 224, 224)
MNIST = (1, 28, 28)
DIGITS = (1, 8, 8)
IMAGENET_CLASSES = 1000
CNN5_WIDTH = 64
DIGITS_CNN5_WIDTH = 16
WRN_FACTOR = 8
DENSENET_GROWTH = 12


@dataclass(frozen=True)
class NetSpec:
    """How a network is built: `builder(n_classes)`, the shape of one input, the default number of classes."""

    builder: Callable[[int], nn.Module]
    input_shape: tuple[int, ...]
    n_classes: int = 10


NETS: dict[str, NetSpec] = {
    "resnet20": NetSpec(partial(cifar_resnet, 20), CIFAR),
    "resnet32": NetSpec(partial(cifar_resnet, 32), CIFAR),
    "resnet44": NetSpec(partial(cifar_resnet, 44), CIFAR),
    "resnet56": NetSpec(partial(cifar_resnet, 56), CIFAR),
    "resnet110": NetSpec(partial(cifar_resnet, 110), CIFAR),
    "wrn16-8": NetSpec(partial(wide_resnet, 16, WRN_FACTOR), CIFAR),
    "vgg16": NetSpec(vgg16_bn, CIFAR),
    "densenet22": NetSpec(partial(densenet, 22, DENSENET_GROWTH), CIFAR),
    "cnn5": NetSpec(partial(cnn5, CNN5_WIDTH), CIFAR),
    "lenet-300-100": NetSpec(lenet_300_100, MNIST),
    "lenet-5": NetSpec(lenet5, MNIST),
    "lstm": NetSpec(lstm, DIGITS),
    "digits-cnn": NetSpec(digits_cnn, DIGITS),
    "digits-cnn5": NetSpec(partial(digits_cnn5, DIGITS_CNN5_WIDTH), DIGITS),
    "digits-fc": NetSpec(digits_fc, DIGITS),
    "resnet18": NetSpec(partial(imagenet_resnet, 18), IMAGENET, IMAGENET_CLASSES),
    "resnet34": NetSpec(partial(imagenet_resnet, 34), IMAGENET, IMAGENET_CLASSES),
    "resnet50": NetSpec(partial(imagenet_resnet, 50), IMAGENET, IMAGENET_CLASSES),
    "resnet101": NetSpec(partial(imagenet_resnet, 101), IMAGENET, IMAGENET_CLASSES),
}


def net_spec(name: str) -> NetSpec:
    """The entry of `NETS` with this name; an unknown name is refused with the nearest known one."""
    if name in NETS:
        return NETS[name]
    near = difflib.get_close_matches(name.lower(), NETS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise OptionError(f"unknown network {name!r}{hint}", fix=f"known: {', '.join(NETS)}")


def build(name: str, *, n_classes: int | None = None, init: Init = "he") -> nn.Module:
    """A freshly initialised network in train mode; `n_classes` left out means the default of its data set.

    `init`: "he" is the rule these networks are built with, "pytorch" that of torch's own layers.
    Initial weights come from torch's global generator: call `torch.manual_seed` before to fix them.
    """
    spec = net_spec(name)
    n_outputs = spec.n_classes if n_classes is None else n_classes
    if isinstance(n_outputs, bool) or not isinstance(n_outputs, int) or n_outputs < 1:
        raise OptionError(f"n_classes for {name!r} must be a whole number of at least 1, not {n_classes!r}")
    check_choice("init", init, get_args(Init))
    net = spec.builder(n_outputs)
    if init == "pytorch":
        torch_init_(net)
    return net
