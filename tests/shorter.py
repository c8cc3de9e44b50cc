"""Makes commands and runs shorter in tests, without changing how they end."""

import pytest


def narrow(patch: pytest.MonkeyPatch) -> None:
    """Makes the network of the digits recipes one of 980 weights: a tenth of the work."""
    patch.setattr("sipp_lab.nets.plain.DIGITS_WIDTHS", (4, 8, 8))


def narrow_resnets(patch: pytest.MonkeyPatch) -> None:
    """Makes ResNets for CIFAR a quarter as wide: all of their layers and names, a sixteenth of the weights."""
    patch.setattr("sipp_lab.nets.resnet.WIDTHS", (4, 8, 16))


def shorten(command: str, patch: pytest.MonkeyPatch) -> None:
    """A recipe that is run trains the narrow network.

    What is timed is called once a turn, however short that is.
    """
    if command == "run":  # the commands that name the network itself meet it as users do
        narrow(patch)
    if command == "bench":
        patch.setattr("sipp.verbs.bench.LEAST_SECONDS", 0.0)
