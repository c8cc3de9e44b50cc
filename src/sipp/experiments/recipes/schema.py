"""What a recipe may say: every field, its type and its range. Unknown keys are refused with the nearest known one."""

from __future__ import annotations

import difflib
import itertools
import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sipp.checking import check_choice, problem_words
from sipp.errors import OptionError
from sipp.experiments.arms import arm_of
from sipp.experiments.pipelines import pipeline_names, pipeline_of
from sipp.options import Draws, Reduce

PipelineName = Annotated[str, AfterValidator(lambda name: check_choice("pipeline", name, pipeline_names()))]
DataName = Literal["digits", "cifar10", "imagenet"]

NAME_PATTERN = r"^[a-z0-9]+(?:[.-][a-z0-9]+)*$"  # a name becomes part of a folder's name: no slash, no "..", no blank
INPUT_SHAPES = {"digits": (1, 8, 8), "cifar10": (3, 32, 32), "imagenet": (3, 224, 224)}
N_CLASSES = {"digits": 10, "cifar10": 10, "imagenet": 1000}

Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


def _known(label: str) -> str:
    return arm_of(label).label


class _Part(BaseModel):
    # strict: "1e-3" is text, not a number, and true is not 1; JSON lists still become tuples.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataSpec(_Part):
    """The data set and how many of its training items are set apart for calibration and holdout."""

    name: DataName
    n_calibration: Count
    n_holdout: Annotated[int, Field(ge=0)] = 0
    split_seed: int = 0


class Decay(_Part):
    """factor@{milestones} or factor@{every, ...} of the paper's tables."""

    factor: Annotated[float, Field(gt=0, le=1)]
    milestones: tuple[Count, ...] | None = None
    every: Count | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Decay:
        if (self.milestones is None) == (self.every is None):
            raise ValueError("give exactly one of milestones (a list of epochs) and every (a number of epochs)")
        rising = self.milestones or ()
        if any(b <= a for a, b in itertools.pairwise(rising)):
            raise ValueError("milestones must rise")
        return self


class Training(_Part):
    """Hyperparameters of training, and of retraining, which repeats it where `retrain` says nothing else."""

    optimizer: Literal["sgd", "adam"]
    epochs: Count
    warmup_epochs: Annotated[float, Field(ge=0)]
    batch_size: Count
    rate: Annotated[float, Field(gt=0)]
    decay: Decay
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0)]
    augment: bool
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    eval_every: Count = 1
    step: Literal["auto", "eager", "graph", "compiled"] = "auto"
    together: Count = 1  # networks that are trained side by side, as one program (the same but for rounding)

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if (self.optimizer == "sgd") != (self.momentum is not None):
            raise ValueError("momentum belongs to optimizer sgd, and sgd needs it (0.0 for none)")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs} is longer than epochs={self.epochs}")
        if any(epoch >= self.epochs for epoch in self.decay.milestones or ()):
            raise ValueError(f"a decay milestone is never reached within epochs={self.epochs}")
        return self


class Distill(_Part):
    """The loss (1 - weight) x cross-entropy + weight x temperature^2 x KL(dense parent || network)."""

    weight: Annotated[float, Field(gt=0, le=1)]
    temperature: Annotated[float, Field(gt=0)]


class Retraining(_Part):
    """What training after a cut does otherwise than `train`; what is left out is the same."""

    epochs: Count | None = None
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    rate: Annotated[float, Field(gt=0)] | None = None
    decay: Decay | None = None
    distill: Distill | None = None


class Pruning(_Part):
    """Arms, and the ladder of budgets: `keeps`, or `levels` times `alpha` of what the level before kept."""

    methods: Annotated[tuple[Annotated[str, AfterValidator(_known)], ...], Field(min_length=1)]
    delta: Share
    alpha: Share | None = None
    levels: Count | None = None
    keeps: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    draws: Draws = "until"
    reduce: Reduce = "max"
    batch_size: Count = 128  # calibration points that go through the network at once

    @model_validator(mode="after")
    def _no_arm_twice(self) -> Pruning:
        arms = [arm_of(label) for label in self.methods]
        if len({(arm.method, arm.reduce or self.reduce) for arm in arms}) != len(arms):
            raise ValueError("a method is listed twice")
        return self

    @model_validator(mode="after")
    def _one_ladder(self) -> Pruning:
        if (self.alpha is None) != (self.levels is None) or (self.alpha is None) == (self.keeps is None):
            raise ValueError("give either alpha and levels, or keeps (a list of shares)")
        if any(b >= a for a, b in itertools.pairwise(self.keeps or ())):
            raise ValueError("keeps must fall")
        return self

    @property
    def n_levels(self) -> int:
        return len(self.keeps) if self.keeps is not None else self.levels or 0

    def keep_at(self, level: int) -> float:
        """The share of weights that a level is to keep; 1 at level 0."""
        if self.keeps is not None:
            return self.keeps[level - 1] if level else 1.0
        return float((self.alpha or 0.0) ** level)


class Recipe(_Part):
    """One experiment: a network, data, training, pruning, and the pipeline that puts them in order."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
    description: str = ""
    pipeline: PipelineName
    net: str
    init: Literal["he", "pytorch"] = "he"
    data: DataSpec
    train: Training
    retrain: Retraining | None = None
    prune: Pruning
    repetitions: Count
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of the first repetition; the others count on from it
    n_threads: Count | None = None  # null leaves torch's own choice

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        from sipp.experiments.nets import net_spec  # the networks themselves, which need torch

        spec = net_spec(self.net)
        if spec.input_shape != INPUT_SHAPES[self.data.name]:
            raise ValueError(
                f"{self.net} takes {spec.input_shape} inputs, {self.data.name} has {INPUT_SHAPES[self.data.name]}"
            )
        if self.data.name == "digits" and self.train.augment:
            raise ValueError("digits are 8 x 8: shifting and mirroring them changes what they show; set augment: false")
        return self

    @model_validator(mode="after")
    def _retrains(self) -> Recipe:
        if self.retrain is not None and not pipeline_of(self.pipeline).has_parent:
            raise ValueError(f"retrain belongs to a pipeline that trains a dense parent first, not to {self.pipeline}")
        assert self.retraining.epochs  # checks it: milestones within the epochs
        return self

    @property
    def retraining(self) -> Training:
        """How a network is trained after a cut: as `train` says, but for what `retrain` says."""
        if self.retrain is None:
            return self.train
        changes = self.retrain.model_dump(exclude_none=True, exclude={"distill"})
        return Training.model_validate({**self.train.model_dump(), **changes}, strict=False)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.repetitions))


def check_recipe(values: Any, *, where: str) -> Recipe:
    """The recipe with these values; every problem is listed with its key, and an unknown key with the nearest."""
    if not isinstance(values, dict):
        raise OptionError(f"a recipe is a mapping of keys to values, not a {type(values).__name__}", where=where)
    try:
        # By way of JSON: there, strict typing tells numbers from text and still takes a list for a tuple.
        return Recipe.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problems = [_problem(dict(one)) for one in error.errors(include_url=False)]
        raise OptionError(f"{where}: " + "; ".join(problems)) from error


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Everything that decides a run's numbers, as plain values; the description does not."""
    return recipe.model_dump(mode="json", exclude={"description"})


def known_keys(path: tuple[str, ...]) -> list[str]:
    """The keys a recipe may have at this place: () is the top, ("train",) its part `train`."""
    model: type[BaseModel] = Recipe
    for part in path:
        field = model.model_fields.get(part)
        inner = field.annotation if field is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)


def _problem(error: dict[str, Any]) -> str:
    path = tuple(str(part) for part in error["loc"])
    key = ".".join(path) or "the recipe"
    if error["type"] == "extra_forbidden":
        known = known_keys(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.0)
        hint = f"did you mean {'.'.join((*path[:-1], near[0]))!r}? " if near else ""
        return f"unknown key {key!r}; {hint}known: {', '.join(known)}"
    hint = ""
    if isinstance(error["input"], str) and error["type"] in ("float_type", "int_type"):
        hint = " (this is text to YAML: no quotes, and 1e-3 is written 1.0e-3)"
    return problem_words({**error, "loc": (key,)}) + hint
