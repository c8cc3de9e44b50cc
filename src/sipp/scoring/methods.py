"""THE list of methods: one row each. `prune`, recipes, the command line and the page read it.

To add a method to the package, write its score in a file of this folder and add a row here; the page picks a colour
for it. Users add one with `register_method`, or pass a function as `method=`. Importing this file does not load torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

from sipp.errors import OptionError
from sipp.results import (
    GIVEN,
    PruneOptions,
    Reduce,
    RepairMethod,
    check,
    other_names,
)

Need = Literal["data", "labels"]
CutRule = Literal["global", "layer", "row", "sampled", "hybrid"]

SENSITIVITY = "sensitivity"  # as a score: the empirical sensitivities themselves (T1-T3)
BLEND = "blend"  # as a score: sensitivities and magnitudes blended, how is chosen on held-back points (T20)

NOTHING: frozenset[Need] = frozenset()
POINTS: frozenset[Need] = frozenset({"data"})
LABELS: frozenset[Need] = frozenset({"data", "labels"})


@dataclass(frozen=True)
class MethodInfo:
    """One method: what it scores by, what it needs, which weights go."""

    name: str
    about: str  # one line for tables, without |
    score: str | Callable[[Any], Any]  # "file:function" of this folder, or a user's function; or SENSITIVITY, or BLEND
    needs: frozenset[Need] = NOTHING
    rule: CutRule = "global"  # which weights go: the smallest of all, the same share of a layer or row, or by sampling
    reduce: Reduce = "max"  # of the sensitivities, by default
    floor: float = 0.0  # under rows and layers, by default; 0: rows may lose all their weights
    fitting: RepairMethod | None = None  # after the cut, this search finds mask and weights again

    @property
    def is_own(self) -> bool:
        """Whether its score is a function that the user gave."""
        return not isinstance(self.score, str)

    @property
    def uses_sensitivities(self) -> bool:
        """Whether the method ranks by sensitivities, alone or blended."""
        return self.score in (SENSITIVITY, BLEND)

    @property
    def is_blend(self) -> bool:
        return self.score == BLEND

    @property
    def is_sampled(self) -> bool:
        return self.rule in ("sampled", "hybrid")

    @property
    def needs_data(self) -> bool:
        return bool(self.needs)

    def repairs(self, repair: bool) -> list[RepairMethod]:
        """What finds new values after the cut: the method's own fit, then the repair."""
        own: list[RepairMethod] = [] if self.fitting is None else [self.fitting]
        return own + (["joint"] if repair else [])


METHODS: tuple[MethodInfo, ...] = (
    MethodInfo("sipp-blend", "sensitivity^p magnitude^(1-p), p chosen by the error on held-back inputs",
               BLEND, POINTS, floor=0.1),
    MethodInfo("sipp-hybrid", "for each row, the better of keeping the most sensitive weights and sampling",
               SENSITIVITY, POINTS, "hybrid"),
    MethodInfo("sipp-det", "keeps the most sensitive weights",
               SENSITIVITY, POINTS),
    MethodInfo("sipp-rand", "samples weights by sensitivity and re-weights them",
               SENSITIVITY, POINTS, "sampled"),
    MethodInfo("sipp-simple", "keeps the most sensitive weights, with the simple bound's constants",
               SENSITIVITY, POINTS),
    MethodInfo("magnitude", "keeps the largest magnitudes",
               "weight_scores:magnitude"),
    MethodInfo("snip", "keeps the largest weight x gradient of the loss, in magnitude",
               "gradient_scores:snip", LABELS),
    MethodInfo("random", "keeps weights at random",
               "weight_scores:random"),
    MethodInfo("lamp", "keeps the largest magnitudes relative to the larger ones in their layer",
               "weight_scores:lamp"),
    MethodInfo("wanda", "keeps the largest magnitude times length of the input, within each row",
               "input_scores:wanda", POINTS, "row"),
    MethodInfo("synflow", "keeps the paths with the largest products of magnitudes, in 100 steps",
               "gradient_scores:synflow", POINTS),
    MethodInfo("grasp", "keeps the weights that carry most of the gradient's norm",
               "gradient_scores:grasp", LABELS),
    MethodInfo("erk", "random weights; each layer's share follows the sum of its dimensions",
               "weight_scores:erk"),
    MethodInfo("obs", "keeps the weights whose removal the rest of the row can least compensate",
               "input_scores:obs", POINTS, "layer"),
    MethodInfo("sparsegpt", "prunes column by column; the weights to the right make up for what was removed",
               "weight_scores:magnitude", POINTS, "layer", fitting="sparsegpt"),
    MethodInfo("alps", "finds mask and weights of each layer together, by alternating directions",
               "weight_scores:magnitude", POINTS, "layer", fitting="alps"),
)  # fmt: skip

NAMES: tuple[str, ...] = tuple(row.name for row in METHODS)
_ROWS = {row.name: row for row in METHODS}  # and those that users register
NAME = r"[a-z0-9]+(?:[._-][a-z0-9]+)*"  # it becomes part of a folder's name, and of an arm's: no blank, no slash
OWN_METHODS = "for a score of your own see sipp.register_method"


def register_method(
    name: str, score: Callable[[Any], Any], *, needs: Need | Collection[Need] = (), about: str = ""
) -> None:
    """Adds your own score to the methods of `prune`, `prune_to`, `compare`, `gradual` and recipes, under a name.

    `score` takes a task and returns {parameter name: tensor of the parameter's shape}; the largest scores in the whole
    network are kept.
    `task.parameters()` are the weights to score, `task.model` is a copy of the network in eval mode, `task.batches()`
    its data: `task.model(*batch.args, **batch.kwargs)`, `batch.labels`. `needs` are its required inputs: "data",
    "labels".
    Registering the same name again replaces it.

    Example:
        >>> import sipp, torch
        >>> def squares(task):
        ...     return {name: weight**2 for name, weight in task.parameters().items()}
        >>> sipp.register_method("squares", squares, about="keeps the largest squares")
        >>> sipp.prune(torch.nn.Linear(8, 4), None, keep=0.5, method="squares").kept
        16
    """
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise OptionError(
            f"name={name!r:.60} is not a name of a method",
            fix="use lower-case letters and digits, with single . - _ between them",
        )
    if name in NAMES or name == GIVEN:
        raise OptionError(f"name={name!r} is a method of the package", fix="choose another name", option="name")
    if not callable(score):
        raise OptionError(f"score={score!r:.60} must be a function of one task", option="score")
    given = list(needs) if isinstance(needs, list | tuple | set | frozenset) else [needs]
    for need in given:
        check.choice("needs", need, get_args(Need))
    if not isinstance(about, str) or "\n" in about:
        raise OptionError(f"about={about!r:.60} must be one line of text", option="about")
    used = LABELS if "labels" in given else POINTS if given else NOTHING
    _ROWS[name] = MethodInfo(name, about or "a score of your own", score, used)


def methods() -> dict[str, MethodInfo]:
    """Returns the methods that `prune` and `compare` know, your own included: what each does and needs, by name.

    Example:
        >>> import sipp
        >>> sipp.methods()["magnitude"].about
        'keeps the largest magnitudes'
    """
    return dict(_ROWS)


def method_of(method: Any) -> MethodInfo:
    """The row of a method by its name, or for a user's function; an OptionError lists all names, and the nearest one.

    A function may read the data, so its points count as points that chose weights.
    """
    if callable(method):
        return MethodInfo(_own_name(method), "a score of your own", method, POINTS)
    if isinstance(method, str) and method in _ROWS:
        return _ROWS[method]
    if isinstance(method, str) and (here := other_names.method_here(method)) is not None:
        raise OptionError(f"method={method!r} is {here[0]}", fix=here[1], option="method")
    near = difflib.get_close_matches(method, _ROWS, n=1) if isinstance(method, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise OptionError(f"method={method!r:.60} is not one of {', '.join(_ROWS)}{hint}", fix=OWN_METHODS, option="method")


def _own_name(score: Any) -> str:
    """The name of a user's function in records and tables."""
    name = getattr(score, "__name__", type(score).__name__)
    return name if name.isidentifier() else "own score"  # a lambda has none


def checked_method(options: PruneOptions, *, masks_only: str = "") -> MethodInfo:
    """The row of the method; raises if it samples weights and a pattern is asked for.

    `masks_only` says why no values can be changed, where that is so: a method that fits them is refused.
    """
    info = method_of(options.method)
    if options.pattern is not None and info.is_sampled:
        raise OptionError(
            f"method={info.name!r} draws weights at random, so it cannot keep to a pattern",
            fix="choose a method that ranks, such as sipp-det, or leave out the pattern",
            option="method",
        )
    if masks_only and info.fitting is not None:
        raise OptionError(
            f"method={info.name!r} finds new values along with its mask, but {masks_only}",
            fix="use it with sipp.prune or sipp.compare",
            option="method",
        )
    return info


def scores_of(task: Any, row: MethodInfo) -> dict[str, Any]:
    """The scores by a method that has a function for them, {parameter name: tensor of its shape}; none is negative."""
    if not isinstance(row.score, str):
        return _function("calling:own_scores")(task, row)
    return _function(row.score)(task)


def _function(place: str) -> Callable[..., dict[str, Any]]:
    """The function at "file:function" of this folder, whose file is imported now."""
    file, _, name = place.partition(":")
    found: Callable[..., dict[str, Any]] = getattr(import_module(f"sipp.scoring.{file}"), name)
    return found
