"""Small networks with zeros in their weights, and what the tests say about them."""

import torch
from torch import nn


class Net(nn.Module):
    """A function of the modules and parameters that it is made with, and of its inputs."""

    def __init__(self, function, *held):
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList([one for one in held if isinstance(one, nn.Module)])
        self.tensors = nn.ParameterList([one for one in held if isinstance(one, nn.Parameter)])

    def forward(self, *given):
        return self.function(*self.inner, *self.tensors, *given)


def thin(model, keep, seed=0):
    """The model with about this share of its weights kept, at random places, and norms that have seen data."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_((torch.rand(parameter.shape, generator=generator) < keep).float())
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.copy_(0.3 * torch.randn(module.num_features, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
    return model.eval()


def kernels(fast):
    return [step.kernel or step.by for step in fast.steps]


def is_close(given, wanted):
    """Whether all is equal to 1e-4 of the largest wanted value, NaN and infinity included."""
    given, wanted = given.detach(), wanted.detach()
    size = wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else torch.tensor(1.0)
    return given.shape == wanted.shape and torch.allclose(
        given, wanted, rtol=1e-4, atol=1e-4 * float(size) + 1e-7, equal_nan=True
    )
