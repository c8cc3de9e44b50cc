"""Options as frozen records, with their defaults and checks.

Importing this file does not import torch, so that the command line can show help quickly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from sipp.errors import OptionError
from sipp.results import check

Reduce = Literal["max", "mean"]  # of a point's patches (T3)
NormStats = Literal["running", "batch"]
RepairMethod = Literal["joint", "refit", "alps", "sparsegpt"]  # masks may move (T21), or stay; searches of others
Method = str | Callable[[Any], Any]  # its name in `scoring/methods.py`, or a score of the caller's own
Precision = Literal["fp32", "lossless", "fp16", "bf16", "int8"]  # of the values in a file of `save`
Draws = Literal["until", "fixed"]  # of a sampled row (T8)
Allocation = Literal["layers", "paper"]  # of the budget of sampled rows (T10)
Mode = Literal["paper", "sound"]  # of the network statement: T12 or T13
Loss = Callable[[Any, Any], Any]  # of outputs and labels, a tensor of one number
Selector = str | type | Sequence[str | type]  # names of weights or modules with *, types of modules

SHARE = 0.05  # of inputs that a certificate may leave out (T14)
GIVEN = "given"  # in records, the method of weights that the caller chose
HELD_BACK_ONE_IN = 4  # inputs: for a blend, for `compare`, for a bound that needs inputs of its own (T18)


MOST_GROUP = 2**20
_FORM = re.compile(r"([0-9]{1,7}):([0-9]{1,7})", re.ASCII)


@dataclass(frozen=True)
class Pattern:
    """n of every m consecutive weights."""

    n: int
    m: int

    def kept(self, fan_in: int) -> int:
        """How many of a neuron's weights stay, of this many inputs."""
        return fan_in // self.m * self.n + min(self.n, fan_in % self.m)

    @classmethod
    def of(cls, text: Any) -> Pattern:
        """Parses a pattern such as "2:4"; OptionError if it is none."""
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        n, m = (int(match.group(1)), int(match.group(2))) if match is not None else (0, 0)
        if not 1 <= n <= m <= MOST_GROUP:
            raise OptionError(
                f"pattern={text!r:.60} is not a pattern n:m with 1 <= n <= m",
                fix="give for example pattern='2:4': two of every four weights are kept",
                option="pattern",
            )
        return cls(n, m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


def _is_pattern(name: str, text: Any) -> str:
    """The text, if it is a pattern."""
    return str(Pattern.of(text))


@dataclass(frozen=True)
class Option:
    """Annotates an argument that is also an option of the command line or a key of a recipe.

    A function of (name, value) behind it in the annotation checks the value.
    """

    words: str  # its line in --help and `sipp run NAME --show`; {methods} is replaced by their names
    group: str | None = None  # its group in --help; None: it is not on the command line
    names: tuple[str, ...] = ()  # if they are not --NAME
    repeated: bool = False  # may be given several times
    parse: Callable[[str], Any] | None = None  # converts its text, if the type does not say how
    least: int | None = None
    most: int | None = None
    metavar: str | None = None  # what --help writes for its value

    GROUPS = ("Model and data", "What to prune", "Guarantee", "Repair", "Output", "Machine")  # in the order of --help


_goal = partial(Option, group="What to prune")
_guarantee = partial(Option, group="Guarantee")
_repair = partial(Option, group="Repair")


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Everything a caller may choose about a pruning; `prune`, `prune_to`, recipes and the command line fill it alike.

    Exactly one of `keep`, `budget` and `pattern` says how much to keep (`budget_for` checks that). The arguments of
    `sipp.prune` have these names and defaults; the options of `sipp prune` and of recipes are made from the fields that
    have an `Option`, their help text.

    Example:
        >>> from sipp.results.options import PruneOptions
        >>> PruneOptions(keep=0.15).method
        'sipp-blend'
    """

    keep: Annotated[float | None, _goal("Share of the prunable weights to keep, in (0, 1]."), check.keep] = None
    budget: int | None = None
    pattern: Annotated[
        str | None,
        _goal("Instead of --keep: n of every m weights of a row, such as 2:4."),
        _is_pattern,
    ] = None
    method: Annotated[Method, _goal("How weights are chosen: {methods}, or one that --code registers.", parse=str)] = (
        "sipp-blend"
    )
    include: Annotated[
        Selector | None,
        _goal("Only layers with this name or glob; may be repeated.", repeated=True),
    ] = None
    exclude: Annotated[
        Selector | None,
        _goal("All layers except this name or glob; may be repeated.", repeated=True),
    ] = None
    floor: Annotated[
        float | None,
        Option(
            "Every row keeps a weight, and every layer this share of an even cut; 0: no floor. Default: 0.1 for "
            "sipp-blend, 0 for other methods.",
        ),
        partial(check.number, least=0, below=1),
    ] = None
    reduce: Annotated[
        Reduce | None, Option("How positions are combined, for methods that leave it open: max (with bounds) or mean.")
    ] = None
    draws: Annotated[Draws, Option("How often a sampled row is drawn: until the budget is met, or a fixed number.")] = (
        "until"
    )
    allocation: Annotated[
        Allocation, Option("How sampled rows share the budget: every layer counts alike, or every row (paper).")
    ] = "layers"
    confidence: Annotated[float, _guarantee("Confidence of certificates and of measured bounds."), check.share] = 0.95
    delta: Annotated[float, Option("Failure probability of the theory."), check.share] = 1e-16  # of T4
    bound: Mode = "paper"
    statements: Annotated[
        bool, _guarantee("Faster: skip the theory's bounds for methods from other papers (magnitude, wanda, ...).")
    ] = True
    c_constant: Annotated[
        float, _guarantee("The theory's constant C, a factor of every bound."), partial(check.number, above=0)
    ] = 3.0
    k_constant: Annotated[
        float,
        _guarantee("The theory's constant K: larger means more calibration inputs."),
        partial(check.number, above=0),
    ] = 3.0
    repair: Annotated[bool, _repair("Find the mask and the weights together, without labels or training.")] = False
    norm_stats: NormStats = "running"  # of BatchNorm: its own, or those of each batch
    loss: Loss | None = None  # of (outputs, labels), for methods that take gradients; None: cross-entropy
    seed: Annotated[
        int, Option("Seed for everything random.", "Machine", least=0, most=check.MOST_SEED), check.seed
    ] = 0

    def __post_init__(self) -> None:
        check.fields_of(self)
        if not self.statements and self.bound != "paper":
            raise OptionError(
                "bound='sound' needs bounds, but statements=False turns them off", fix="leave out one or the other"
            )
