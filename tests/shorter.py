"""Less of what takes the time of commands and runs, and decides nothing of how they end."""

import pytest


def narrow(patch: pytest.MonkeyPatch) -> None:
    """Makes the network of the digits recipes one of 980 weights: a tenth of the work."""
    patch.setattr("sipp.experiments.nets.digits_cnn.WIDTHS", (4, 8, 8))


def narrow_resnets(patch: pytest.MonkeyPatch) -> None:
    """Makes ResNets for CIFAR a quarter as wide: all of their layers and names, a sixteenth of the weights."""
    patch.setattr("sipp.experiments.nets.cifar_resnet.WIDTHS", (4, 8, 16))


def shorten(command: str, patch: pytest.MonkeyPatch) -> None:
    """A recipe that is run trains the narrow network; figures are small and in one format (report/test_figures.py)."""
    if command == "run":  # the commands that name the network itself meet it as users do
        narrow(patch)
    if command == "report":
        patch.setattr("sipp.report.figures.FORMATS", ("png",))
        patch.setattr("sipp.report.figures.DPI", 20)
