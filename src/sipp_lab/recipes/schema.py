"""The schema of a recipe: every key with its type and range. Errors name whole keys and suggest the nearest one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)

from sipp.errors import OptionError
from sipp.results import PruneOptions, check
from sipp_lab.arms import arm_of
from sipp_lab.nets import INPUT_SHAPES, net_spec
from sipp_lab.recipes.merging import merge
from sipp_lab.recipes.problems import problem_words

DataName = Literal["digits", "mnist", "cifar10", "imagenet", "own"]
Precision = Literal["float32", "bfloat16"]
StepKind = Literal["auto", "eager", "graph", "compiled"]
OWN = "own"  # a network or data from the user's own code

NAME_PATTERN = r"^[a-z0-9]+(?:[.-][a-z0-9]+)*$"  # used in folder names: no slash, no "..", no space

Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


def _known_pipeline(name: str) -> str:
    from sipp_lab.pipelines import PIPELINES  # which read recipes

    check.choice("pipeline", name, tuple(PIPELINES))
    return name


def _valid_label(label: str, info: ValidationInfo) -> str:
    return arm_of(label, own=info.context or ()).label


# In messages of the checks below, @ stands for the section: "@epochs" is shown as "train.epochs".


class _Section(BaseModel):
    # strict: "1e-3" is text, not a number, and true is not 1; JSON lists still become tuples.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class DataSpec(_Section):
    """The data set, and how many of its training items are held back for calibration and holdout."""

    name: DataName
    """the data set"""
    n_calibration: Count
    """training inputs held back for scoring weights"""
    n_holdout: Annotated[int, Field(ge=0)] = 0
    """training inputs held back for certificates"""
    split_seed: int = 0
    """seed of that split, the same for all repetitions"""


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
        rising = self.milestones or ()
        if any(b <= a for a, b in itertools.pairwise(rising)):
            raise ValueError("milestones must increase")
        return self


class Training(_Section):
    """Hyperparameters of training, and of retraining unless `retrain` says otherwise."""

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
    step: StepKind = "auto"
    """how a step runs: as written, as a CUDA graph, or compiled"""

    @model_validator(mode="after")
    def _consistent(self) -> Training:
        if (self.optimizer == "sgd") != (self.momentum is not None):
            raise ValueError("@momentum belongs to @optimizer=sgd, which needs it (0.0 for none)")
        if self.nesterov and not self.momentum:
            raise ValueError("@nesterov needs a @momentum above 0")
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"@warmup_epochs={self.warmup_epochs} is longer than @epochs={self.epochs}")
        late = [epoch for epoch in self.decay.milestones or () if epoch >= self.epochs]
        if late:
            raise ValueError(f"@decay.milestones has {late[0]}, which is never reached within @epochs={self.epochs}")
        return self


class Distill(_Section):
    """The loss (1 - weight) x cross-entropy + weight x temperature^2 x KL(dense parent || network)."""

    weight: Annotated[float, Field(gt=0, le=1)]
    """weight of the parent's outputs; the labels get the rest"""
    temperature: Annotated[float, Field(gt=0)]
    """what both outputs are divided by"""


class RetrainingDecay(_Section):
    """What differs from `train.decay`."""

    factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """as in train"""
    milestones: tuple[Count, ...] | None = None
    """as in train"""
    every: Count | None = None
    """as in train"""


class Retraining(_Section):
    """What differs from `train` when training after a cut; if only the epochs do, milestones keep their shares."""

    epochs: Count | None = None
    """epochs after a cut"""
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None
    """as in train"""
    rate: Annotated[float, Field(gt=0)] | None = None
    """as in train"""
    decay: RetrainingDecay | None = None
    """as in train"""
    distill: Distill | None = None
    """learn the dense parent's outputs as well"""


FROM_PRUNE = ("delta", "c_constant", "k_constant", "draws", "allocation", "reduce", "repair")


def _section_of_prune() -> Any:
    """A section with these options of `sipp.prune`: types, defaults, words and checks are those of `PruneOptions`."""
    hints = get_type_hints(PruneOptions, include_extras=True)
    defaults = {field.name: field.default for field in fields(PruneOptions)}
    defaults["reduce"] = "max"  # by name, so that an arm without a reduction equals the one that says it

    def key(name: str) -> Any:
        def checked(value: Any) -> Any:
            PruneOptions(**{name: value})
            return value

        words = hints[name].__metadata__[0].words
        return Annotated[hints[name], AfterValidator(checked)], Field(defaults[name], description=words)

    return create_model("_OfPrune", __base__=_Section, **{name: key(name) for name in FROM_PRUNE})


class Pruning(_section_of_prune()):  # type: ignore[misc]
    """Methods, and how much each level keeps: `keeps`, or `alpha` of the level before, `levels` times."""

    methods: Annotated[tuple[Annotated[str, AfterValidator(_valid_label)], ...], Field(min_length=1)]
    """arms: a method, or a method and its reduction over patches ("sipp-det mean")"""
    alpha: Share | None = None
    """the share that each level KEEPS of what the level before kept"""
    levels: Count | None = None
    """number of levels"""
    keeps: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    """the share of all weights that each level keeps, instead of alpha and levels"""
    batch_size: Count = 128
    """calibration inputs per forward pass"""

    @model_validator(mode="after")
    def _no_arm_twice(self, info: ValidationInfo) -> Pruning:
        arms = [arm_of(label, own=info.context or ()) for label in self.methods]
        if len({(arm.method, arm.reduce or self.reduce) for arm in arms}) != len(arms):
            raise ValueError("a method is listed twice")
        return self

    @model_validator(mode="after")
    def _one_ladder(self) -> Pruning:
        if (self.alpha is None) != (self.levels is None) or (self.alpha is None) == (self.keeps is None):
            raise ValueError("give either alpha and levels, or keeps (a list of shares)")
        if any(b >= a for a, b in itertools.pairwise(self.keeps or ())):
            raise ValueError("keeps must decrease")
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


class Code(_Section):
    """The user's own code as package.module:callable; named on the command line, never in a file."""

    net: str | None = None
    """makes the network"""
    data: str | None = None
    """gives the data"""
    methods: dict[str, str] | None = None
    """the user's own scores that the recipe names, each with a digest of its source"""


class Recipe(_Section):
    """One experiment: a network, data, training, pruning, and the pipeline that combines them."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=80)]
    """the recipe's name, and the start of its runs' folders"""
    description: str = ""
    """one line"""
    pipeline: Annotated[str, AfterValidator(_known_pipeline)]
    """in which order networks are pruned and trained"""
    net: str
    """the network"""
    init: Literal["he", "pytorch", "fan-out"] = "he"
    """how weights are initialised: by He's rule, as torch's layers do, or convolutions by fan-out as the authors"""
    data: DataSpec
    """the data set and its split"""
    train: Training
    """training"""
    retrain: Retraining | None = None
    """what is different when training after a cut"""
    prune: Pruning
    """methods and levels"""
    code: Code | None = None
    """the user's own code, named on the command line only"""
    repetitions: Count
    """number of seeds"""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """seed of the first repetition; the others count up from it"""
    n_threads: Count | None = None
    """CPU threads; null leaves torch's own choice"""

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        code = self.code or Code()
        if (self.net == OWN) != (code.net is not None) or (self.data.name == OWN) != (code.data is not None):
            raise ValueError("a network or data of your own are named on the command line: --model, --own-data")
        if self.net == OWN and self.init != "he":
            raise ValueError("init has no effect on your own network, which sets its own weights")
        if OWN in (self.net, self.data.name):
            return self
        spec = net_spec(self.net)
        if spec.input_shape != INPUT_SHAPES[self.data.name]:
            raise ValueError(
                f"{self.net} takes {spec.input_shape} inputs, {self.data.name} has {INPUT_SHAPES[self.data.name]}"
            )
        if self.data.name in ("digits", "mnist") and self.train.augment:
            raise ValueError("shifting and mirroring digits changes what they show; set train.augment: false")
        return self

    @model_validator(mode="after")
    def _retrains(self) -> Recipe:
        from sipp_lab.pipelines import PIPELINES

        if self.retrain is not None and not PIPELINES[self.pipeline].has_parent:
            raise ValueError(f"retrain belongs to a pipeline that trains a dense parent first, not to {self.pipeline}")
        if self.prune.repair and self.pipeline != "iterative":
            raise ValueError(f"prune.repair belongs to the pipeline iterative, not to {self.pipeline}")
        try:
            assert self.retraining.epochs
        except ValidationError as error:
            words = problem_words(dict(error.errors(include_url=False)[0]))
            raise ValueError(words.replace("@", "retrain.")) from error
        return self

    @property
    def retraining(self) -> Training:
        """How a network is trained after pruning: `train` with the changes in `retrain`."""
        if self.retrain is None:
            return self.train
        train = self.train.model_dump(mode="json")
        changes = self.retrain.model_dump(mode="json", exclude_none=True, exclude={"distill"})
        return Training.model_validate(merge(train, changes), strict=False)

    def hyper_of(self, method: str | None) -> Training:
        """How a network is trained: the dense one (no method), or one that was cut."""
        return self.train if method is None else self.retraining

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.repetitions))


def check_recipe(values: Any, *, where: str) -> Recipe:
    """Validates a recipe; the error lists every problem with its key."""
    if not isinstance(values, dict):
        raise OptionError(f"a recipe is a mapping of keys to values, not a {type(values).__name__}", where=where)
    try:
        # Via JSON, where pydantic's strict mode tells numbers from text but accepts a list for a tuple.
        return Recipe.model_validate_json(json.dumps(values, default=str), context=_own_names(values))
    except ValidationError as error:
        problems = [_describe_problem(dict(problem)) for problem in error.errors(include_url=False)]
        raise OptionError(f"{where}: " + "; ".join(problems)) from error


def _own_names(values: dict[str, Any]) -> tuple[str, ...]:
    """The user's own methods in a configuration; their code need not be loaded."""
    code = values.get("code")
    methods = code.get("methods") if isinstance(code, dict) else None
    return tuple(methods) if isinstance(methods, dict) else ()


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Everything that determines a run's results, as plain values (so without the description)."""
    return recipe.model_dump(mode="json", exclude={"description"})


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe: its value (None if unset) and meaning."""

    key: str
    value: Any
    meaning: str


def recipe_keys(recipe: Recipe) -> list[RecipeKey]:
    """Every key that a recipe may have, in order, including those this one does not set."""
    return list(_keys_of(Recipe, recipe.model_dump(mode="json"), ""))


def _keys_of(model: type[BaseModel], values: dict[str, Any], prefix: str) -> Iterator[RecipeKey]:
    for name, field in model.model_fields.items():
        inner, value = _section_of(field.annotation), values.get(name)
        if inner is None:
            yield RecipeKey(prefix + name, value, field.description or "")
        else:
            yield from _keys_of(inner, value or {}, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class in an annotation (optional or not); None for a plain value."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def known_keys(path: tuple[str, ...]) -> list[str]:
    """The keys allowed in a section of a recipe: () is the top level, ("train",) the section `train`."""
    start = "".join(f"{part}." for part in path)
    below = (row.key.removeprefix(start) for row in _keys_of(Recipe, {}, "") if row.key.startswith(start))
    return list(dict.fromkeys(key.partition(".")[0] for key in below))


def _describe_problem(error: dict[str, Any]) -> str:
    path = tuple(str(part) for part in error["loc"])
    key = ".".join(path) or "the recipe"
    if error["type"] == "extra_forbidden":
        known = known_keys(path[:-1])
        hint = check.nearest(key, [".".join((*path[:-1], name)) for name in known])
        return f"unknown key {key!r}{hint}; known: {', '.join(known)}"
    hint = ""
    if isinstance(error["input"], str) and error["type"] in ("float_type", "int_type"):
        hint = " (this is text to YAML: no quotes, and 1e-3 is written 1.0e-3)"
    return problem_words({**error, "loc": (key,)}).replace("@", f"{key}." if path else "") + hint
