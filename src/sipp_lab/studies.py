"""Studies: the recipes of a figure of the paper, in the order of its panels, with what the paper says about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sipp.errors import OptionError
from sipp.results import check
from sipp_lab.recipes import Recipe, recipe_of
from sipp_lab.recipes.table import SHORT

Form = Literal["short", "full"]
Panel = dict[str, Any]  # a recipe's values over those of its `base`

ON_CIFAR10 = ("resnet20", "resnet56", "resnet110", "vgg16", "densenet22", "wrn16-8")
QUICK = (
    "This short form reproduces no figure of the paper: it trains for a tenth of the epochs or less, or on smaller "
    "data; --full is the paper's."
)


@dataclass(frozen=True)
class Study:
    """One study; `small` are the panels of its short form if they are not the short forms of the full ones."""

    name: str
    description: str
    source: str  # the figure of the paper
    claim: str  # what the paper says about it
    panels: tuple[Panel, ...]
    small: tuple[Panel, ...] = ()

    def note(self, form: Form) -> str:
        """What a short form is not; empty for the paper's schedules."""
        return QUICK if form == "short" else ""

    def recipes(self, form: Form, settings: Sequence[str] = ()) -> list[Recipe]:
        """The recipes of a form, in the order of the panels, with these settings (`key=value`) over each."""
        panels = self.panels
        if form == "short":
            panels = self.small or tuple({**panel, "base": panel["base"] + SHORT} for panel in self.panels)
        return [
            recipe_of(panel, where=f"study {self.name!r}, {form}, recipe {number}", settings=settings)
            for number, panel in enumerate(panels, start=1)
        ]


def _panels(*names: str, **over: Any) -> tuple[Panel, ...]:
    return tuple({"base": name, **over} for name in names)


def _distilled(base: str, **over: Any) -> Panel:
    return {
        "base": base,
        "name": f"{base}-distilled",
        "retrain": {"distill": {"weight": 0.5, "temperature": 4.0}},
        **over,
    }


_BLEND = {"methods": ["sipp-blend", "magnitude", "lamp", "sipp-det mean"]}
_TWO = {"methods": ["sipp-blend", "magnitude"]}
_VARIANTS = {"methods": ["sipp-det mean", "sipp-det max", "sipp-rand", "sipp-hybrid", "magnitude"]}
_SHORT_GRADUAL = "resnet20-cifar10-gradual-short"

ALL = (
    Study(
        "blend",
        "sipp-blend against magnitude, LAMP and the paper's det; iterative, gradual, gradual with distillation",
        "no figure of the paper; sipp-blend (T20), the gradual schedule and distillation are ours",
        "none",
        (
            *_panels("resnet20-cifar10-iterative", prune=_BLEND),
            *_panels("resnet20-cifar10-gradual"),
            _distilled("resnet20-cifar10-gradual"),
        ),
        (
            *_panels("resnet20-cifar10-iterative-short", prune=_BLEND),
            *_panels(_SHORT_GRADUAL, prune=_TWO),
            _distilled(_SHORT_GRADUAL, prune=_TWO),
        ),
    ),
    Study(
        "paper-at-init",
        "prune the initial network, then train, six networks on CIFAR-10",
        "Random-init + prune + train (section 6.3), three panels, and the six of the supplement",
        "At low prune ratios all methods do uniformly well. Beyond 90 % magnitude drops to chance (10 %); SNIP does "
        "consistently well, sipp-hybrid does as well as SNIP on all networks, and on ResNet20 and ResNet56 all forms "
        "of SiPP do so or better. det tends to be best at small prune ratios, rand at extreme ones.",
        _panels(*(f"{net}-cifar10-at-init" for net in ON_CIFAR10)),
    ),
    Study(
        "paper-cnn5",
        "CNN5, both pipelines; a small one on digits here, CIFAR-10 in the full form",
        "Section 6.1 names CNN5 among the networks; no figure shows it",
        "SiPP performs consistently across networks and pipelines.",
        _panels("cnn5-cifar10-iterative", "cnn5-cifar10-at-init"),
        _panels("digits-cnn5-iterative", "digits-cnn5-at-init", repetitions=3),
    ),
    Study(
        "paper-fully-connected",
        "a fully-connected network, both pipelines; digits here, MNIST in the full form",
        "Section 6 names fully-connected networks; no figure shows one",
        "SiPP prunes fully-connected, convolutional and residual networks alike.",
        _panels("lenet-300-100-mnist-iterative", "lenet-300-100-mnist-at-init"),
        _panels("digits-fc-iterative", "digits-fc-at-init", repetitions=3),
    ),
    Study(
        "paper-iterative",
        "prune and retrain level by level, six networks on CIFAR-10, ResNet18 and ResNet101 on ImageNet",
        "Iterative prune + retrain (section 6.2), its six panels, the large form in the supplement, and ImageNet",
        "SiPP (det) is en par with magnitude (learning-rate rewinding) on every network; SNIP is much lower.",
        _panels(
            *(f"{net}-cifar10-iterative" for net in ON_CIFAR10),
            "resnet18-imagenet-iterative",
            "resnet101-imagenet-iterative",
        ),
        _panels(*(f"{net}-cifar10-iterative-short" for net in ON_CIFAR10)),
    ),
    Study(
        "paper-variants",
        "det, rand and hybrid side by side, prune and retrain level by level, ResNet20 and ResNet56",
        "The three variations of the algorithm (supplement), two panels",
        "The three variants of SiPP perform very similarly, so the simplest of them (det) stands for all.",
        _panels("resnet20-cifar10-iterative", "resnet56-cifar10-iterative", prune=_VARIANTS),
    ),
)
STUDIES = {study.name: study for study in ALL}


def study_named(name: str) -> Study:
    """The study with this name."""
    if name in STUDIES:
        return STUDIES[name]
    raise OptionError(f"unknown study {name!r:.60}{check.nearest(name, STUDIES)}", fix=f"known: {', '.join(STUDIES)}")
