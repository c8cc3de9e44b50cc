"""What `sipp prune` was asked for: checked before any work, and the points it means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from sipp.cli.errors import NOT_CERTIFIED, Trouble, at
from sipp.cli.models import weights_read
from sipp.cli.options import n_points_of
from sipp.cli.points import (
    Points,
    Role,
    Source,
    collect,
    default_points,
    draw,
    example_of,
    open_source,
    points_read,
    split,
)
from sipp.experiments.nets import NETS
from sipp.inputs.data import ASIDE_SHARE
from sipp.records.binomial import holdout_needed
from sipp.records.checking import check_share
from sipp.records.options import DELTA, HOLDOUT_DELTA, Draws, Floor, Method, Mode, Precision, Reduce
from sipp.records.pattern import pattern_of
from sipp.scoring.methods import method_of
from sipp.scoring.theory_points import sample_size
from sipp.storage.outputs import FILE_SUFFIX, NETWORK, check_file, check_folder, check_ledger

N_NOISE = 16  # points of noise for a dry run of a built-in network without data


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """What the user asked for."""

    model: str
    weights: Path | None
    data: str | None
    keep: float | None
    budget: int | None
    pattern: str | None
    epsilon: float | None
    max_accuracy_drop: float | None
    holdout: str | None
    normalise: str | None
    method: Method
    include: list[str] | None
    exclude: list[str] | None
    points: str | None
    holdout_points: int | None
    delta: float
    holdout_delta: float
    confidence: float
    draws: Draws
    reduce: Reduce | None
    floor: Floor
    repair: bool
    statements: bool
    bound: Mode
    output: str | None
    ledger: Path | None
    seed: int
    batch_size: int | None
    device: str
    dry_run: bool
    out: Path | None
    values: Precision
    force: bool

    @property
    def is_one_file(self) -> bool:
        """Whether --out names a file of `sipp.save`, and not a folder."""
        return self.out is not None and self.out.suffix == FILE_SUFFIX

    @property
    def rounds(self) -> bool:
        """Whether the stored values are not those of the pruning."""
        return self.values not in ("fp32", "lossless")

    @property
    def has_tolerance(self) -> bool:
        return self.epsilon is not None or self.max_accuracy_drop is not None


def check(request: PruneRequest) -> None:
    """Refuses what cannot be meant, before any work."""
    goals = {
        "--keep": request.keep,
        "--budget": request.budget,
        "--pattern": request.pattern,
        "--epsilon": request.epsilon,
        "--max-accuracy-drop": request.max_accuracy_drop,
    }
    given = [name for name, value in goals.items() if value is not None]
    if len(given) != 1:
        raise Trouble(
            "how far to prune must be said once" if not given else f"{' and '.join(given)} exclude each other",
            where="sipp prune",
            fix=f"give exactly one of {', '.join(goals)}",
        )
    if request.out is None and not request.dry_run:
        raise Trouble(
            "the pruned network would be lost",
            where="sipp prune",
            fix="give --out DIR or --out NAME.safetensors, or --dry-run to see the table",
        )
    reads = weights_read("--weights", request.weights) + points_read("--data", request.data)
    reads += points_read("--holdout", request.holdout)
    if request.out is not None:
        with at(f"--out {request.out}", "give another place"):
            if request.is_one_file:
                check_file(request.out, NETWORK, force=request.force, inputs=reads)
            else:
                check_folder(request.out, force=request.force, inputs=reads)
    if request.dry_run and request.ledger is not None:
        raise Trouble(
            "a dry run writes nothing, so its look at the holdout would go unrecorded",
            where=f"--ledger {request.ledger}",
            fix="leave out --dry-run, or the ledger",
        )
    kept_for_keep = {
        "--draws": request.draws != "until",
        "--bound": request.bound != "paper",
        "--delta": request.delta != DELTA,
        "--no-statements": not request.statements,
    }
    for_certificates = {
        "--output": request.output is not None,
        "--ledger": request.ledger is not None,
        "--holdout-delta": request.holdout_delta != HOLDOUT_DELTA,
        "--holdout-points": request.holdout_points is not None,
    }
    if request.has_tolerance:
        _refuse_ignored(kept_for_keep, f"cannot be chosen with {given[0]}", "leave it out, or use --keep")
    elif request.holdout is None:
        _refuse_ignored(for_certificates, "serves a certificate only", "give --holdout or --epsilon, or leave it out")
    _check_values(request, given[0])
    _check_numbers(request)
    if request.ledger is not None:
        with at(f"--ledger {request.ledger}", "allow reading and writing, or give another file"):
            check_ledger(request.ledger, out=request.out, inputs=reads)


def _check_values(request: PruneRequest, goal: str) -> None:
    """Refuses values that nothing would be stored with, or that nothing would be certified about."""
    if request.values != "fp32" and not request.is_one_file:
        _refuse_ignored(
            {f"--values {request.values}": True},
            "is of one file, and a folder holds plain weights",
            f"give --out NAME{FILE_SUFFIX}, or leave it out",
        )
    if request.rounds and request.has_tolerance:
        raise Trouble(
            f"the walk to {goal} certifies the values before rounding, not those in the file",
            where=f"--values {request.values}",
            fix="give --values lossless; or --keep with --holdout, which certifies what is stored",
        )


def _refuse_ignored(given: dict[str, bool], why: str, fix: str) -> None:
    """Refuses an option that would be ignored."""
    ignored = [name for name, is_given in given.items() if is_given]
    if ignored:
        raise Trouble(f"{', '.join(ignored)} {why}", where="sipp prune", fix=fix)


def _check_numbers(request: PruneRequest) -> None:
    """Refuses a number outside of its range, naming its option."""
    if request.keep is not None and not 0 < request.keep <= 1:
        raise Trouble(
            f"{request.keep} is not in (0, 1]",
            where=f"--keep {request.keep}",
            fix="give the share to keep: 0.15 keeps 15 %",
        )
    if request.epsilon is not None and not 0 <= request.epsilon < math.inf:
        raise Trouble(
            f"{request.epsilon} is no error",
            where=f"--epsilon {request.epsilon}",
            fix="give a number from 0 on, such as 0.1",
        )
    if request.pattern is not None:
        with at(f"--pattern {request.pattern}", "give for example 2:4"):
            pattern_of(request.pattern)
    with at(f"--delta {request.delta}", "give a probability between 0 and 1, such as 1e-16"):
        check_share("delta", request.delta)
    shares = {"confidence": request.confidence, "holdout-delta": request.holdout_delta}
    if request.max_accuracy_drop is not None:
        shares["max-accuracy-drop"] = request.max_accuracy_drop
    for name, value in shares.items():
        with at(f"--{name} {value}", "give a share between 0 and 1"):
            check_share(name, value)


def points_for(request: PruneRequest, model: nn.Module) -> tuple[Points | None, Points | None]:
    """Calibration and holdout points, disjoint; None where they are not needed."""

    def opened(spec: str, role: Role, option: str) -> Source:
        return open_source(spec, role, option, seed=request.seed, model=request.model, normalise=request.normalise)

    holdout = None
    if request.holdout is not None:
        source = opened(request.holdout, "holdout", "--holdout")
        n_holdout = request.holdout_points or default_points(source, "holdout", lambda: 0)
        holdout = draw(source, n_holdout, seed=request.seed, batch_size=request.batch_size, model=model)
    if not method_of(request.method).needs_data and request.data is None and not request.has_tolerance:
        return None, holdout
    spec = _data_spec(request)
    source = opened(spec, "calibration", "--data")
    if request.has_tolerance and source.kind == "random":
        raise Trouble(
            "a certificate on noise says nothing about your inputs", where=f"--data {spec}", fix="give real points"
        )

    def needed() -> int:
        example = example_of(source, model, request.model, seed=request.seed)
        with at(f"--model {request.model}", "see sipp prune --help"):
            n = sample_size(
                model, example, request.delta, method=request.method, include=request.include, exclude=request.exclude
            )
        return math.ceil(n / (1 - ASIDE_SHARE)) if method_of(request.method).is_blend else n  # so many are to be left

    n = n_points_of(request.points, source.n_points, needed, lambda: default_points(source, "calibration", needed))
    if request.has_tolerance and holdout is None:
        if source.has_holdout:
            other = opened(spec, "holdout", "--data")
            n_holdout = request.holdout_points or default_points(other, "holdout", lambda: 0)
            holdout = draw(other, n_holdout, seed=request.seed, batch_size=request.batch_size, model=model)
        else:
            parts = split(source, n, request.holdout_points, seed=request.seed)
            ours, theirs = (collect(source, p, batch_size=request.batch_size, model=model) for p in parts)
            return ours, theirs
    return draw(source, n, seed=request.seed, batch_size=request.batch_size, model=model), holdout


def _data_spec(request: PruneRequest) -> str:
    if request.data is not None:
        return request.data
    if request.dry_run and request.model in NETS and not request.has_tolerance:
        return "random:" + "x".join(map(str, (N_NOISE, *NETS[request.model].input_shape)))
    shape = "x".join(map(str, (N_NOISE, *NETS[request.model].input_shape))) if request.model in NETS else "16x3x224x224"
    raise Trouble(
        f"{request.method} needs data" if not request.has_tolerance else "a tolerance is certified on data",
        where="sipp prune",
        fix=f"give --data; random:{shape} is noise of a shape, for a dry run",
    )


def check_enough(request: PruneRequest, holdout: Points) -> None:
    """Tells before the work that the holdout is too small for any claim (T14)."""
    if request.max_accuracy_drop is not None:
        return
    needed = holdout_needed(request.holdout_delta, 1.0 - request.confidence)
    if holdout.n_points < needed:
        raise Trouble(
            f"not certified: needs n >= {needed} holdout points, there are {holdout.n_points}; nothing was written",
            where=f"--holdout {holdout.spec}"
            if request.holdout
            else f"--data {holdout.spec}, the half split off as holdout",
            fix=f"give {needed} points or more, or a larger --holdout-delta",
            code=NOT_CERTIFIED,
        )
