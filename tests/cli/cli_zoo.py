"""Networks that the tests name on the command line as `cli_zoo:callable`."""

import os
import signal

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def half() -> nn.Module:
    return mlp().to(torch.bfloat16)


def talks() -> nn.Module:
    print("this network talks while it is built")
    return mlp()


def grouped() -> nn.Module:
    torch.manual_seed(1)
    first, second = nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 3, groups=8)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))


def transposed() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.ConvTranspose2d(1, 2, 3), nn.Flatten(), nn.Linear(40, 3))


class Named(nn.Module):
    """Takes two inputs by name, gives its output in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": self.linear(left) + right, "other": left}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes))


def not_a_network() -> int:
    return 3


def raises() -> nn.Module:
    raise RuntimeError("my own bug")


def interrupted() -> nn.Module:
    raise KeyboardInterrupt


def terminated() -> nn.Module:
    os.kill(os.getpid(), signal.SIGTERM)
    return mlp()


def ends_the_program() -> nn.Module:
    raise SystemExit(0)


class Wrapped(nn.Module):
    """A network whose own names look like a wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def small_conv() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))


def wrapped() -> nn.Module:
    return Wrapped()
