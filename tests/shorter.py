"""Makes commands and runs shorter in tests, without changing how they end."""

from dataclasses import replace
from typing import Any

import pytest

from sipp.repairing import repair_network
from sipp.repairing.repair_options import Candidates


def narrow(patch: pytest.MonkeyPatch) -> None:
    """Makes the network of the digits recipes one of 980 weights: a tenth of the work."""
    patch.setattr("sipp_lab.nets.plain.DIGITS_WIDTHS", (4, 8, 8))


def narrow_resnets(patch: pytest.MonkeyPatch) -> None:
    """Makes ResNets for CIFAR a quarter as wide: all of their layers and names, a sixteenth of the weights."""
    patch.setattr("sipp_lab.nets.cifar_resnet.WIDTHS", (4, 8, 16))


def search_once(patch: pytest.MonkeyPatch) -> None:
    """A joint search tries one aim and one kind of budgets, as it does where it is told which."""
    candidates_for = repair_network.candidates_for

    def first_of_each(*given: Any) -> Candidates:
        tried = candidates_for(*given)
        return replace(tried, error_feedbacks=tried.error_feedbacks[:1], budgets=tried.budgets[:1])

    patch.setattr(repair_network, "candidates_for", first_of_each)


def shorten(command: str, patch: pytest.MonkeyPatch) -> None:
    """A recipe that is run trains the narrow network.

    What is timed is called once a turn, however short that is.
    """
    search_once(patch)
    if command == "run":  # the commands that name the network itself meet it as users do
        narrow(patch)
    if command == "bench":
        patch.setattr("sipp.cli.bench_network.LEAST_SECONDS", 0.0)
