"""Makes commands and runs shorter in tests, without changing how they end."""

import pytest

from sipp.report import figures


def narrow(patch: pytest.MonkeyPatch) -> None:
    """Makes the network of the digits recipes one of 980 weights: a tenth of the work."""
    patch.setattr("sipp_lab.nets.plain.DIGITS_WIDTHS", (4, 8, 8))


def narrow_resnets(patch: pytest.MonkeyPatch) -> None:
    """Makes ResNets for CIFAR a quarter as wide: all of their layers and names, a sixteenth of the weights."""
    patch.setattr("sipp_lab.nets.cifar_resnet.WIDTHS", (4, 8, 16))


def shorten(command: str, patch: pytest.MonkeyPatch) -> None:
    """A recipe that is run trains the narrow network; one small figure a run is drawn (report/test_figures.py: all).

    What is timed is called once a turn, however short that is.
    """
    if command == "run":  # the commands that name the network itself meet it as users do
        narrow(patch)
    if command == "bench":
        patch.setattr("sipp.verbs.bench.LEAST_SECONDS", 0.0)
    if command == "report":
        of_run = figures._figures
        patch.setattr(figures, "_figures", lambda run: dict([*of_run(run).items()][:1]))
        patch.setattr("sipp.report.figures.FORMATS", ("png",))
        patch.setattr("sipp.report.figures.DPI", 20)
