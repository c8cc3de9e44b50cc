"""The paper's experiments as one table: networks, with the hyperparameters of its two tables, times pipelines.

NAME is NET-DATA-PIPELINE (on digits: NET-PIPELINE), NAME-short its short form: a tenth of the epochs, a coarse ladder,
one seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]

ITERATIVE, AT_INIT, GRADUAL = "iterative", "at-init", "gradual"
WORDS = {
    ITERATIVE: "train once, then prune and retrain level by level",
    AT_INIT: "prune the initial network to each level, then train",
    GRADUAL: "train once, then train again for each level and prune little by little",
}
SHORT = "-short"

# What the authors ran: the mean over patches for det, the maximum for rand and hybrid.
METHODS = {
    ITERATIVE: ["sipp-det mean", "magnitude", "snip"],
    AT_INIT: ["sipp-hybrid", "sipp-det mean", "sipp-rand", "magnitude", "snip"],
    GRADUAL: ["sipp-blend", "magnitude"],
}
# The ladders of the authors' program for networks that are pruned at initialisation.
KEEPS = [0.8, 0.4916, 0.3021, 0.1857, 0.1141, 0.07012, 0.04309, 0.02648, 0.01627, 0.01]
RESNET20_KEEPS = [0.8, 0.635, 0.504, 0.4, 0.3175, 0.252, 0.2, 0.1587, 0.126, 0.1, 0.08, 0.06, 0.04, 0.02]
# Gradually, each keep costs the whole schedule: those of seven and ten cuts by a fifth, as others publish.
GRADUAL_KEEPS = [0.21, 0.107]
SHORT_LADDER = {"alpha": 0.5, "levels": 5}

# --- training: one column of the paper's tables each ------------------------------------------------------------------

SGD: Values = {"optimizer": "sgd", "momentum": 0.9, "warmup_epochs": 5.0, "augment": True, "eval_every": 5}
SHORT_TRAIN: Values = {"warmup_epochs": 0.5, "eval_every": 1}


def _column(epochs: int, batch_size: int, rate: float, decay: Values, *, weight_decay: float, **more: Any) -> Values:
    return {
        **SGD, "epochs": epochs, "batch_size": batch_size, "rate": rate, "decay": decay, "weight_decay": weight_decay,
        "nesterov": False, **more,
    }  # fmt: skip


RESNET = _column(182, 128, 0.1, {"factor": 0.1, "milestones": [91, 136]}, weight_decay=1e-4)
VGG16 = _column(300, 256, 0.05, {"factor": 0.5, "every": 30}, weight_decay=5e-4)
DENSENET22 = _column(300, 64, 0.1, {"factor": 0.1, "milestones": [150, 225]}, weight_decay=1e-4, nesterov=True)
WRN16_8 = _column(200, 128, 0.1, {"factor": 0.2, "every": 60}, weight_decay=5e-4, nesterov=True)
IMAGENET = _column(90, 256, 0.1, {"factor": 0.1, "milestones": [30, 60, 80]}, weight_decay=1e-4)
# No column has the LeNets: Adam, as the lottery-ticket study trained LeNet-300-100.
LENET: Values = {
    "optimizer": "adam", "momentum": None, "epochs": 20, "warmup_epochs": 0.0, "batch_size": 60, "rate": 1.2e-3,
    "decay": {"factor": 1.0, "every": 20}, "weight_decay": 0.0, "augment": False,
}  # fmt: skip
# A smoke test on embedded data: minutes on two cores.
DIGITS: Values = {
    "optimizer": "sgd", "momentum": 0.9, "nesterov": False, "epochs": 8, "warmup_epochs": 1.0, "batch_size": 64,
    "rate": 0.1, "decay": {"factor": 0.1, "milestones": [6]}, "weight_decay": 5e-4, "augment": False,
}  # fmt: skip
SIX_EPOCHS: Values = {"epochs": 6, "decay": {"factor": 0.1, "milestones": [3, 5]}}


# --- networks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A network with its data and training, and how many levels it is pruned to iteratively."""

    data: str
    train: Values
    levels: int
    keeps: list[float] = field(default_factory=lambda: KEEPS)  # at initialisation
    pipelines: tuple[str, ...] = (ITERATIVE, AT_INIT)
    alpha: float = 0.85  # the share that a level KEEPS
    repetitions: int = 3
    short: Values = field(default_factory=dict)  # of training; without one there is no short form
    retrain: Values | None = None  # iteratively
    about: str = ""


CIFAR10, MNIST, IMAGES = "cifar10", "mnist", "imagenet"
SHORT_RESNET: Values = {"epochs": 18, "decay": {"milestones": [9, 13]}}

ROWS: dict[str, Row] = {
    "resnet20": Row(CIFAR10, RESNET, 23, RESNET20_KEEPS, (ITERATIVE, AT_INIT, GRADUAL), short=SHORT_RESNET),
    "resnet56": Row(CIFAR10, RESNET, 20, short=SHORT_RESNET),
    "resnet110": Row(CIFAR10, RESNET, 20, short=SHORT_RESNET),
    # The paper names CNN5 and gives it no column: the schedule is that of the ResNets.
    "cnn5": Row(CIFAR10, RESNET, 23, short=SHORT_RESNET),
    # 150 epochs of retraining as the name of the paper's figure says; its table has one number for both.
    "vgg16": Row(CIFAR10, VGG16, 20, short={"epochs": 30, "decay": {"every": 3}},
                 retrain={"epochs": 150, "decay": {"every": 30}}),
    "densenet22": Row(CIFAR10, DENSENET22, 22, short={"epochs": 30, "decay": {"milestones": [15, 22]}}),
    "wrn16-8": Row(CIFAR10, WRN16_8, 23, short={"epochs": 20, "decay": {"every": 6}}),
    "lenet-300-100": Row(MNIST, LENET, 23),
    "lenet-5": Row(MNIST, LENET, 23),
    # One network each, as the authors; ResNet101 to 18 %, as they.
    "resnet18": Row(IMAGES, IMAGENET, 18, pipelines=(ITERATIVE,), alpha=0.9, repetitions=1,
                    short={"epochs": 9, "decay": {"milestones": [3, 6, 8]}}),
    "resnet101": Row(IMAGES, IMAGENET, 16, pipelines=(ITERATIVE,), alpha=0.9, repetitions=1,
                     short={"epochs": 9, "decay": {"milestones": [3, 6, 8]}}),
}  # fmt: skip

DIGITS_KEEPS = [0.5, 0.2, 0.1, 0.05, 0.02]
DIGITS_ROWS: dict[str, tuple[str, Values, Values]] = {  # {start of the name: words, net and training, pruning}
    "digits": ("a small network", {"net": "digits-cnn", "train": DIGITS},
               {"methods": ["sipp-det", "sipp-hybrid", "magnitude", "snip"], "alpha": 0.5, "levels": 5}),
    "digits-cnn5": ("a small CNN5 (four convolutions)", {"net": "digits-cnn5", "train": {**DIGITS, **SIX_EPOCHS}},
                    {"methods": ["sipp-hybrid", "sipp-det mean", "sipp-det max", "sipp-rand", "sipp-blend", "magnitude",
                                 "snip"], "keeps": DIGITS_KEEPS}),
    # One patch an input: the mean is the maximum.
    "digits-fc": ("a fully-connected network 64-300-100-10",
                  {"net": "digits-fc", "train": {**DIGITS, **SIX_EPOCHS, "rate": 0.05}},
                  {"methods": ["sipp-hybrid", "sipp-det", "sipp-rand", "sipp-blend", "magnitude", "snip"],
                   "keeps": DIGITS_KEEPS}),
}  # fmt: skip

# --- recipes ----------------------------------------------------------------------------------------------------------

DATA_WORDS = {CIFAR10: "CIFAR-10", MNIST: "MNIST", IMAGES: "ImageNet"}


def _full(net: str, row: Row, pipeline: str) -> Values:
    """The recipe of a network and a pipeline, as in the paper."""
    ladder: Values = {"alpha": row.alpha, "levels": row.levels}
    if pipeline != ITERATIVE:
        ladder = {"keeps": row.keeps if pipeline == AT_INIT else GRADUAL_KEEPS}
    values = {
        "description": f"{net} on {DATA_WORDS[row.data]}, {WORDS[pipeline]}",
        "pipeline": pipeline,
        "net": net,
        "repetitions": row.repetitions,
        "seed": 0,
        # 256 calibration inputs are more than T4 asks for in every column (at most 184). The paper trains on all the
        # others: set data.n_holdout for certificates (T14).
        "data": {"name": row.data, "n_calibration": 256, "n_holdout": 0},
        "train": row.train,
        "prune": {**ladder, "methods": METHODS[pipeline]},
    }
    values |= {"init": "fan-out"} if pipeline == AT_INIT else {}  # as the authors
    return values | ({"retrain": row.retrain} if row.retrain and pipeline == ITERATIVE else {})


def _short(name: str, full: Values, row: Row) -> Values:
    """The short form of a recipe."""
    train = {**full["train"], **SHORT_TRAIN, **row.short, "decay": {**full["train"]["decay"], **row.short["decay"]}}
    prune = {key: value for key, value in full["prune"].items() if key != "keeps"} | SHORT_LADDER
    values = {**full, "description": f"short form of {name}", "repetitions": 1, "train": train, "prune": prune}
    if full["pipeline"] == GRADUAL:
        values["prune"] = {**prune, "methods": METHODS[ITERATIVE]}
    if "retrain" in full:
        values["retrain"] = {"epochs": full["retrain"]["epochs"] // 10, "decay": row.short["decay"]}
    return values


def _on_digits(words: str, net: Values, prune: Values, pipeline: str) -> Values:
    return {
        "description": f"{words} on digits, {WORDS[pipeline]}",
        "pipeline": pipeline,
        "repetitions": 1,
        "seed": 0,
        "n_threads": 1,  # 8 x 8 images: handing work to a second thread costs more than the work
        # Only the first shows certificates. The others repeat the paper, which trains on all that is not in S.
        "data": {"name": "digits", "n_calibration": 200, "n_holdout": 400 if net["net"] == "digits-cnn" else 0},
        "prune": prune,
        **net,
    }


def _all() -> dict[str, Values]:
    """{name: values} of all recipes."""
    recipes = {}
    for net, row in ROWS.items():
        for pipeline in row.pipelines:
            name = f"{net}-{row.data}-{pipeline}"
            recipes[name] = _full(net, row, pipeline)
            if row.short:
                recipes[name + SHORT] = _short(name, recipes[name], row)
    for name, row_of_digits in DIGITS_ROWS.items():
        for pipeline in (ITERATIVE, AT_INIT, GRADUAL) if name == "digits" else (ITERATIVE, AT_INIT):
            recipes[f"{name}-{pipeline}"] = _on_digits(*row_of_digits, pipeline)
    return dict(sorted(recipes.items()))


RECIPES = _all()
