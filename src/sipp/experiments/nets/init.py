"""The given network with fresh weights: by He's rule, which all convolutional networks share, or by torch's own."""

from typing import Literal

from torch import nn

Init = Literal["he", "pytorch"]


def he_init_(net: nn.Module) -> None:
    """Redraws every convolution and linear weight of `net` from N(0, 2 / fan_in), and sets biases to 0.

    Draws come from torch's global generator, as in every torch constructor: `torch.manual_seed` fixes them.
    Normalisation layers keep torch's own start (scale 1, shift 0).
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def torch_init_(net: nn.Module) -> None:
    """Redraws every convolution and linear layer of `net` as torch's constructors do.

    Weights and biases are uniform in +-1/sqrt(fan_in), a sixth of the variance of He's rule. Draws come from torch's
    global generator.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()
