"""What `sipp prune` was asked for: checked before any work, and the points it means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from sipp.binomial import points_needed
from sipp.checking import check_share
from sipp.cli.errors import NOT_CERTIFIED, Trouble, at
from sipp.cli.files import check_folder, check_ledger
from sipp.cli.models import weights_read
from sipp.cli.options import n_points_of
from sipp.cli.points import Points, check_fits, collect, default_points, draw, open_source, points_read, split
from sipp.experiments.nets import NETS
from sipp.inputs.batches import batches_of
from sipp.options import Draws, Mode, Reduce
from sipp.scoring.methods import Method
from sipp.scoring.theory_points import check_delta, sample_size

DELTA = 1e-16  # of T4
HOLDOUT_DELTA, CONFIDENCE = 0.05, 0.95  # of T14
NEEDS_NO_DATA = ("wt", "random")
N_NOISE = 16  # points of noise for a dry run of a built-in network without data


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What the user asked for."""

    model: str
    weights: Path | None
    data: str | None
    keep: float | None
    budget: int | None
    epsilon: float | None
    max_accuracy_drop: float | None
    holdout: str | None
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
    bound: Mode
    output: str | None
    ledger: Path | None
    seed: int
    batch_size: int | None
    device: str
    dry_run: bool
    out: Path | None
    force: bool
    progress: bool

    @property
    def has_tolerance(self) -> bool:
        return self.epsilon is not None or self.max_accuracy_drop is not None


def check(ask: Ask) -> None:
    """Nothing; refuses what cannot be meant, before any work."""
    goals = {
        "--keep": ask.keep,
        "--budget": ask.budget,
        "--epsilon": ask.epsilon,
        "--max-accuracy-drop": ask.max_accuracy_drop,
    }
    given = [name for name, value in goals.items() if value is not None]
    if len(given) != 1:
        raise Trouble(
            "how far to prune must be said once" if not given else f"{' and '.join(given)} exclude each other",
            "sipp prune",
            f"give exactly one of {', '.join(goals)}",
        )
    if ask.out is None and not ask.dry_run:
        raise Trouble("the pruned network would be lost", "sipp prune", "give --out DIR, or --dry-run to see the table")
    reads = weights_read("--weights", ask.weights) + points_read("--data", ask.data)
    reads += points_read("--holdout", ask.holdout)
    if ask.out is not None:
        with at(f"--out {ask.out}", "give another folder"):
            check_folder(ask.out, force=ask.force, inputs=reads)
    if ask.dry_run and ask.ledger is not None:
        raise Trouble(
            "a dry run writes nothing, so its look at the holdout would go unrecorded",
            f"--ledger {ask.ledger}",
            "leave out --dry-run, or the ledger",
        )
    kept_for_keep = {
        "--draws": ask.draws != "until",
        "--bound": ask.bound != "paper",
        "--delta": ask.delta != DELTA,
    }
    for_certificates = {
        "--output": ask.output is not None,
        "--ledger": ask.ledger is not None,
        "--holdout-delta": ask.holdout_delta != HOLDOUT_DELTA,
        "--holdout-points": ask.holdout_points is not None,
    }
    if ask.has_tolerance:
        _refuse_ignored(kept_for_keep, f"cannot be chosen with {given[0]}", "leave it out, or use --keep")
    elif ask.holdout is None:
        _refuse_ignored(for_certificates, "serves a certificate only", "give --holdout or --epsilon, or leave it out")
    _check_numbers(ask)
    if ask.ledger is not None:
        with at(f"--ledger {ask.ledger}", "allow reading and writing, or give another file"):
            check_ledger(ask.ledger, out=ask.out, inputs=reads)


def _refuse_ignored(given: dict[str, bool], why: str, fix: str) -> None:
    """Nothing; an option that would be ignored is refused instead."""
    ignored = [name for name, is_given in given.items() if is_given]
    if ignored:
        raise Trouble(f"{', '.join(ignored)} {why}", "sipp prune", fix)


def _check_numbers(ask: Ask) -> None:
    """Nothing; refuses a number outside of its range, naming its option."""
    if ask.keep is not None and not 0 < ask.keep <= 1:
        raise Trouble(f"{ask.keep} is not in (0, 1]", f"--keep {ask.keep}", "give the share to keep: 0.15 keeps 15 %")
    if ask.epsilon is not None and not 0 <= ask.epsilon < math.inf:
        raise Trouble(f"{ask.epsilon} is no error", f"--epsilon {ask.epsilon}", "give a number from 0 on, such as 0.1")
    with at(f"--delta {ask.delta}", "give a probability between 0 and 1, such as 1e-16"):
        check_delta(ask.delta)
    shares = {"confidence": ask.confidence, "holdout-delta": ask.holdout_delta}
    if ask.max_accuracy_drop is not None:
        shares["max-accuracy-drop"] = ask.max_accuracy_drop
    for name, value in shares.items():
        with at(f"--{name} {value}", "give a share between 0 and 1"):
            check_share(name, value)


def points_for(ask: Ask, model: nn.Module) -> tuple[Points | None, Points | None]:
    """Calibration and holdout points, disjoint; None where they are not needed."""
    holdout = None
    if ask.holdout is not None:
        source = open_source(ask.holdout, "holdout", "--holdout", seed=ask.seed)
        n_holdout = ask.holdout_points or default_points(source, "holdout", lambda: 0)
        holdout = draw(source, n_holdout, seed=ask.seed, batch_size=ask.batch_size, model=model)
    if ask.method in NEEDS_NO_DATA and ask.data is None and not ask.has_tolerance:
        return None, holdout
    spec = _data_spec(ask)
    source = open_source(spec, "calibration", "--data", seed=ask.seed)
    if ask.has_tolerance and source.kind == "random":
        raise Trouble("a certificate on noise says nothing about your inputs", f"--data {spec}", "give real points")

    def needed() -> int:
        first = draw(source, 1, seed=ask.seed, batch_size=1, model=model)
        check_fits(model, first, ask.model, "--data")
        batch = next(iter(batches_of(first.batches)))
        example = (batch.kwargs or batch.args, None)
        with at(f"--model {ask.model}", "see sipp prune --help"):
            return sample_size(model, example, ask.delta, method=ask.method, include=ask.include, exclude=ask.exclude)

    n = n_points_of(ask.points, source.n_points, needed, lambda: default_points(source, "calibration", needed))
    if ask.has_tolerance and holdout is None:
        if source.has_holdout:
            other = open_source(spec, "holdout", "--data", seed=ask.seed)
            n_holdout = ask.holdout_points or default_points(other, "holdout", lambda: 0)
            holdout = draw(other, n_holdout, seed=ask.seed, batch_size=ask.batch_size, model=model)
        else:
            parts = split(source, n, ask.holdout_points, seed=ask.seed)
            ours, theirs = (collect(source, p, batch_size=ask.batch_size, model=model) for p in parts)
            return ours, theirs
    return draw(source, n, seed=ask.seed, batch_size=ask.batch_size, model=model), holdout


def _data_spec(ask: Ask) -> str:
    if ask.data is not None:
        return ask.data
    if ask.dry_run and ask.model in NETS and not ask.has_tolerance:
        return "random:" + "x".join(map(str, (N_NOISE, *NETS[ask.model].input_shape)))
    shape = "x".join(map(str, (N_NOISE, *NETS[ask.model].input_shape))) if ask.model in NETS else "16x3x224x224"
    raise Trouble(
        f"{ask.method} needs data" if not ask.has_tolerance else "a tolerance is certified on data",
        "sipp prune",
        f"give --data; random:{shape} is noise of a shape, for a dry run",
    )


def check_enough(ask: Ask, holdout: Points) -> None:
    """Nothing; tells before the work that the holdout is too small for any claim (T14)."""
    if ask.max_accuracy_drop is not None:
        return
    needed = points_needed(ask.holdout_delta, 1.0 - ask.confidence)
    if holdout.n_points < needed:
        raise Trouble(
            f"not certified: needs n >= {needed} holdout points, there are {holdout.n_points}; nothing was written",
            f"--holdout {holdout.spec}" if ask.holdout else f"--data {holdout.spec}, the half split off as holdout",
            f"give {needed} points or more, or a larger --holdout-delta",
            NOT_CERTIFIED,
        )
