"""What a recipe is: every key with its type, its range and what it means. Errors name whole keys."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sipp.errors import OptionError
from sipp.results import Allocation, Draws, PruneOptions, Sheet, Table, check
from sipp_lab.nets import INPUT_SHAPES, net_spec
from sipp_lab.recipes.arms import arm_of, label_of

Precision = Literal["float32", "bfloat16"]

NAME_PATTERN = r"^[a-z0-9]+(?:[.-][a-z0-9]+)*$"  # used in folder names: no slash, no "..", no space

Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


def is_own(name: str) -> bool:
    """Whether this names a network or data of the user's own: package.module:callable."""
    return ":" in name


def _data_name(name: str) -> str:
    if not is_own(name):
        check.choice("data.name", name, tuple(INPUT_SHAPES))
    return name


class _Section(BaseModel):
    # strict: "1e-3" is text, not a number, and true is not 1; JSON lists still become tuples.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class DataSpec(_Section):
    """The data set, and how many of its training items are held back for calibration and holdout."""

    name: Annotated[str, AfterValidator(_data_name)]
    """the data set"""
    n_calibration: Count
    """training inputs held back for scoring weights"""
    n_holdout: Annotated[int, Field(ge=0)] = 0
    """training inputs held back for certificates"""


class Decay(_Section):
    """Learning-rate decay: factor@{milestones} or factor@{every, ...} in the paper's tables."""

    factor: Annotated[float, Field(gt=0, le=1)]
    """factor that a decay multiplies the rate by"""
    milestones: tuple[Count, ...] | None = None
    """epochs after which the rate decays"""
    every: Count | None = None
    """epochs between two decays, instead of milestones"""

    @model_validator(mode="after")
    def _one_of_two(self) -> Decay:
        if (self.milestones is None) == (self.every is None):
            raise ValueError("give exactly one of milestones (a list of epochs) and every (a number of epochs)")
        if any(b <= a for a, b in itertools.pairwise(self.milestones or ())):
            raise ValueError("milestones must increase")
        return self


class Distill(_Section):
    """The loss (1 - weight) x cross-entropy + weight x temperature^2 x KL(dense parent || network)."""

    weight: Annotated[float, Field(gt=0, le=1)]
    """weight of the parent's outputs; the labels get the rest"""
    temperature: Annotated[float, Field(gt=0)]
    """what both outputs are divided by"""


class Training(_Section):
    """Hyperparameters of training, and of retraining but for what `retrain` says."""

    optimizer: Literal["sgd", "adam"]
    """the optimizer"""
    epochs: Count
    """epochs of training"""
    warmup_epochs: Annotated[float, Field(ge=0)]
    """epochs over which the rate rises from 0"""
    batch_size: Count
    """images of a step"""
    rate: Annotated[float, Field(gt=0)]
    """the nominal learning rate"""
    decay: Decay
    """when and how the rate falls"""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """of SGD"""
    nesterov: bool = False
    """use Nesterov's form of momentum"""
    weight_decay: Annotated[float, Field(ge=0)]
    """of all parameters"""
    augment: bool
    """shift images by up to 4 pixels and mirror them"""
    precision: Precision = "float32"
    """data type of the network; the loss is always float32"""
    channels_last: bool = False
    """memory layout that suits convolutions on GPUs"""
    eval_every: Count = 1
    """epochs between evaluations on the test set; the last epoch is always evaluated"""
    distill: Distill | None = None
    """learn the dense parent's outputs as well; only in retrain"""

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if self.optimizer == "sgd" and self.momentum is None:
            raise ValueError("optimizer=sgd needs a momentum (0.0 for none)")
        if self.optimizer == "adam" and self.momentum is not None:
            raise ValueError("optimizer=adam takes no momentum: set momentum to null")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs} is longer than epochs={self.epochs}")
        late = [epoch for epoch in self.decay.milestones or () if epoch >= self.epochs]
        if late:
            raise ValueError(f"decay.milestones has {late[0]}, which is never reached within epochs={self.epochs}")
        return self


FROM_PRUNE = ("delta", "c_constant", "k_constant", "draws", "allocation", "repair")


def _of_prune(name: str) -> Any:
    """The default and the words of an option of `sipp.prune`, from `PruneOptions`."""
    option = get_type_hints(PruneOptions, include_extras=True)[name].__metadata__[0]
    return Field(getattr(PruneOptions, name), description=option.words)


class Pruning(_Section):
    """Methods, and how much each level keeps: `keeps`, or `alpha` of the level before, `levels` times."""

    delta: float = _of_prune("delta")
    c_constant: float = _of_prune("c_constant")
    k_constant: float = _of_prune("k_constant")
    draws: Draws = _of_prune("draws")
    allocation: Allocation = _of_prune("allocation")
    repair: bool = _of_prune("repair")
    methods: Annotated[tuple[Annotated[str, AfterValidator(label_of)], ...], Field(min_length=1)]
    """arms: a method, or a method and its reduction over patches ("sipp-det mean")"""
    alpha: Share | None = None
    """the share that each level KEEPS of what the level before kept"""
    levels: Count | None = None
    """number of levels"""
    keeps: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    """the share of all weights that each level keeps, instead of alpha and levels"""

    @field_validator(*FROM_PRUNE)
    @classmethod
    def _as_prune_checks(cls, value: Any, info: ValidationInfo) -> Any:
        PruneOptions(**{str(info.field_name): value})
        return value

    @model_validator(mode="after")
    def _one_ladder_and_no_arm_twice(self) -> Pruning:
        if (self.alpha is None) != (self.levels is None) or (self.alpha is None) == (self.keeps is None):
            raise ValueError("give either alpha and levels, or keeps (a list of shares)")
        if any(b >= a for a, b in itertools.pairwise(self.keeps or ())):
            raise ValueError("keeps must decrease")
        if len({arm_of(label) for label in self.methods}) != len(self.methods):
            raise ValueError("a method is listed twice")
        return self

    @property
    def of_prune(self) -> dict[str, Any]:
        """The options of `sipp.prune` that the recipe sets."""
        return {name: getattr(self, name) for name in FROM_PRUNE}

    @property
    def n_levels(self) -> int:
        return len(self.keeps) if self.keeps is not None else self.levels or 0

    def keep_at(self, level: int) -> float:
        """The share of weights that a level should keep; 1 at level 0."""
        if self.keeps is not None:
            return self.keeps[level - 1] if level else 1.0
        return float((self.alpha or 0.0) ** level)


class Recipe(_Section):
    """One experiment: a network, data, training, pruning, and the pipeline that combines them."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
    """the recipe's name, and the start of its runs' folders"""
    description: str = ""
    """one line"""
    pipeline: str
    """in which order networks are pruned and trained"""
    net: str
    """the network"""
    init: Literal["he", "pytorch", "fan-out"] = "he"
    """how weights are initialised: by He's rule, as torch's layers do, or convolutions by fan-out as the authors"""
    data: DataSpec
    """the data set and its split"""
    train: Training
    """training"""
    retrain: Training | None = None
    """training after a cut, as `train` but for what is given; with other epochs, the rate decays at the same shares"""
    prune: Pruning
    """methods and levels"""
    repetitions: Count
    """number of seeds"""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """seed of the first repetition; the others count up from it"""
    n_threads: Count | None = None
    """CPU threads; null leaves torch's own choice"""

    @model_validator(mode="after")
    def _network_fits_data(self) -> Recipe:
        if is_own(self.net) and self.init != "he":
            raise ValueError("init has no effect on your own network, which sets its own weights")
        if is_own(self.net) or is_own(self.data.name):
            return self
        spec = net_spec(self.net)
        if spec.input_shape != INPUT_SHAPES[self.data.name]:
            raise ValueError(
                f"{self.net} takes {spec.input_shape} inputs, {self.data.name} has {INPUT_SHAPES[self.data.name]}"
            )
        is_augmented = self.train.augment or (self.retrain is not None and self.retrain.augment)
        if self.data.name in ("digits", "mnist") and is_augmented:
            raise ValueError(
                "shifting and mirroring digits changes what they show; set augment: false in train and retrain"
            )
        return self

    @model_validator(mode="after")
    def _pipeline_has_what_is_asked(self) -> Recipe:
        from sipp_lab.pipelines import PIPELINES  # which read recipes

        check.choice("pipeline", self.pipeline, tuple(PIPELINES))
        if self.retrain is not None and PIPELINES[self.pipeline].parent is None:
            raise ValueError(f"retrain belongs to a pipeline that trains a dense parent first, not to {self.pipeline}")
        if self.train.distill is not None:
            raise ValueError("train.distill: the dense network has no parent to learn from; set retrain.distill")
        if self.prune.repair and self.pipeline != "iterative":
            raise ValueError(f"prune.repair belongs to the pipeline iterative, not to {self.pipeline}")
        return self

    def hyper_of(self, method: str | None) -> Training:
        """How a network is trained: the dense one (no method), or one that was cut."""
        return self.train if method is None else self.retrain or self.train

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.repetitions))


def check_recipe(values: dict[str, Any], *, where: str) -> Recipe:
    """Validates a recipe; the error lists every problem with its key."""
    try:
        # Via JSON, where pydantic's strict mode tells numbers from text but accepts a list for a tuple.
        return Recipe.model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        problems = [_described(dict(problem)) for problem in error.errors(include_url=False)]
        raise OptionError(f"{where}: " + "; ".join(problems)) from error


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Everything that determines a run's results, as plain values (so without the description)."""
    return recipe.model_dump(mode="json", exclude={"description"})


def recipe_keys(recipe: Recipe) -> list[dict[str, Any]]:
    """{"key": its whole name, "value": None if unset, "meaning"} of every key that a recipe may have, in order."""
    keys = _keys_of(Recipe, recipe.model_dump(mode="json"))
    return [{"key": key, "value": value, "meaning": meaning} for key, value, meaning in keys]


def keys_sheet(recipe: Recipe) -> Sheet:
    """Every key of a recipe, its value as JSON (which is YAML), and what it means."""
    rows = tuple((row["key"], json.dumps(row["value"]), row["meaning"]) for row in recipe_keys(recipe))
    return Sheet(recipe.name, tables=(Table(("key", "value", "meaning"), rows, texts=("value", "meaning")),))


def _keys_of(section: type[BaseModel], values: Any = None, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """(key, value, what it means) of every key, in order; of a section that is unset, all values are None."""
    for name, field in section.model_fields.items():
        inner = _section_in(field.annotation)
        value = None if values is None else values[name]
        if inner is None:
            yield prefix + name, value, field.description or ""
        else:
            yield from _keys_of(inner, value, f"{prefix}{name}.")


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section in an annotation (optional or not); None for a plain value."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


PLAIN_WORDS = {"int_type": "must be a whole number", "float_type": "must be a number", "missing": "is missing"}


def _described(problem: dict[str, Any]) -> str:
    """A problem that pydantic found, in words, with its whole key."""
    *path, last = (str(part) for part in problem["loc"] or ("the recipe",))
    start, kind, value = "".join(f"{part}." for part in path), problem["type"], problem["input"]
    key = start + last
    if kind == "extra_forbidden":
        below = (name.removeprefix(start) for name, *_ in _keys_of(Recipe) if name.startswith(start))
        known = list(dict.fromkeys(name.partition(".")[0] for name in below))
        hint = check.nearest(key, [start + name for name in known])
        return f"unknown key {key!r}{hint}; known: {', '.join(known)}"
    if kind == "value_error":  # a check above
        return f"{key}: {problem['ctx']['error']}"
    said = problem["msg"].replace("Input should", "must").replace("String should", "must")
    words = f"{key!r} {PLAIN_WORDS.get(kind, said)}"
    words += "" if isinstance(value, dict) else f", found {value!r:.60}"
    if isinstance(value, str) and kind in ("float_type", "int_type"):
        words += " (this is text to YAML: no quotes, and 1e-3 is written 1.0e-3)"
    if isinstance(value, str) and kind in ("tuple_type", "list_type"):
        words += f" (write [{value}])"
    return words
