"""Measures each holdout point: how far its output moved, whether its class changed, what of its tokens did (T22)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from sipp.errors import DataError, ModelError
from sipp.inputs import Batch, labels, outputs
from sipp.results import Measure

MeasureFunction = Callable[[Tensor, Tensor, Batch], dict[str, Tensor]]  # of dense and pruned outputs; n numbers each

TOKENS = "input_ids"  # of a dict batch
CHUNK = 1 << 24  # logits processed at once: they are the largest tensors of a language model
MOST_POSITIONS = 1_000_000  # of a sequence: float64 can distinguish two shares of so many


def point_ratios(dense_out: Tensor, pruned_out: Tensor) -> Tensor:
    """||f^ - f|| / ||f|| per point (n x ... -> n, float64), such that ratio > epsilon is the violation Z of T14.

    0 where f^ = f, also for f = 0; +inf for f = 0 != f^ and for anything not finite. Rounded up to the next float64
    where ratio * ||f|| < ||f^ - f||, so that the reported epsilon always satisfies the inequality it stands for.
    """
    n = dense_out.shape[0]
    f, g = dense_out.double().reshape(n, -1), pruned_out.double().reshape(n, -1)
    error, size = outputs.row_norms(g - f), outputs.row_norms(f)
    ratio = torch.where(error == 0, torch.zeros_like(error), error / size)
    ratio = torch.where(ratio * size < error, torch.nextafter(ratio, torch.full_like(ratio, math.inf)), ratio)
    # An overflowing norm would make the quotient 0: it counts as not finite, like the outputs themselves.
    finite = f.isfinite().all(dim=1) & g.isfinite().all(dim=1) & error.isfinite() & size.isfinite()
    return torch.where(finite, ratio, torch.full_like(ratio, math.inf))


def measure_of(name: Measure) -> MeasureFunction:
    """The function that measures what a certificate limits: the `ratio` of each point."""
    if name == "output":
        return lambda f, g, _: {"ratio": point_ratios(f, g)}
    return partial(_mean_change, which=0 if name == "kl" else 1)


def _mean_change(f: Tensor, g: Tensor, batch: Batch, which: int) -> dict[str, Tensor]:
    """Per sequence (T22), for the next token: the mean KL(f || f^) in nats (which=0), or how often it changes (1)."""
    _check_token_logits(f, batch)
    changes_nT = _token_changes(f.double(), g.double())[which]
    return {"ratio": mean_at(changes_nT, _real_positions(batch, f.shape[:2], f.device))}


def classes_of(f: Tensor, g: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """The class of each dense and pruned output and whether the output is finite, and whether they differ."""
    dense, pruned = ((out.argmax(dim=-1), out.isfinite().all(dim=-1)) for out in (f, g))
    return dense, pruned, (dense[0] != pruned[0]) | ~dense[1] | ~pruned[1]


@dataclass(frozen=True)
class Outcomes:
    """What pruning did to the answer at each point (T16; n each): a flag, or for sequences a share of positions."""

    lost: Tensor  # dense right and pruned wrong
    gained: Tensor  # the reverse
    differ: Tensor  # their classes differ
    has_label: Tensor
    is_sequence: Tensor  # its outcomes are shares of positions
    dense_right: Tensor

    @property
    def are_sequences(self) -> bool:
        """Whether the points are sequences, for which T22 holds."""
        return bool(self.is_sequence.any())


def outcomes_of(f: Tensor, g: Tensor, batch: Batch) -> dict[str, Tensor]:
    """The fields of `Outcomes`, of dense and pruned outputs; of sequences if these are n x tokens x vocabulary.

    With non-finite outputs the pruned network counts as wrong and the dense one as right, which can only raise the
    limit.
    """
    if f.dim() == 3 and f.shape[2] > 1:
        changed = mean_at(classes_of(f, g)[2], _real_positions(batch, f.shape[:2], f.device))
        return _outcomes(changed, is_sequence=True)
    if f.dim() != 2 or f.shape[1] < 2:
        raise ModelError(
            f"outputs are {tuple(f.shape)}, accuracy needs n x classes",
            where=batch.where,
            fix="select with output=",
            option="output",
        )
    (f_class, f_fine), (g_class, g_fine), differ = classes_of(f, g)
    if batch.labels is None:
        return _outcomes(differ)
    classes = labels.truth_of(batch.labels, len(f), f.shape[1])
    if classes.classes_n is None:
        raise DataError(classes.why, where=batch.where, fix="give class numbers or one-hot rows, or leave labels out")
    truth = classes.classes_n.to(f.device)
    if ((truth < 0) | (truth >= f.shape[1])).any():
        raise DataError(
            f"a label lies outside 0 .. {f.shape[1] - 1}", where=batch.where, fix="drop such inputs or map them first"
        )
    f_right, g_right = (f_class == truth) | ~f_fine, (g_class == truth) & g_fine
    labelled = {"lost": f_right & ~g_right, "gained": ~f_right & g_right, "dense_right": f_right}
    return _outcomes(differ) | labelled | {"has_label": torch.ones_like(f_right)}


def _outcomes(differ: Tensor, *, is_sequence: bool = False) -> dict[str, Tensor]:
    """The fields of `Outcomes` without labels: nothing is right, lost or gained."""
    no_n = torch.zeros(len(differ), dtype=torch.bool, device=differ.device)
    none = dict.fromkeys(("lost", "gained", "has_label", "dense_right"), no_n)
    return {**none, "differ": differ, "is_sequence": no_n | is_sequence}


def outcome_counts(outcomes: Outcomes, hashes: Sequence[str]) -> tuple[int, int, int, int]:
    """The sums over all points (lost, gained, differ, labelled): lost and differ rounded up, gained rounded down.

    Of several copies only the smallest gain counts, once.
    """
    columns = (outcomes.lost, outcomes.differ, outcomes.has_label)
    sums = (_exact_sum(column_n.double().tolist()) for column_n in columns)
    lost, differ, labelled = map(math.ceil, sums)
    gains: dict[str, float] = {}
    for found, gained in zip(hashes, outcomes.gained.double().tolist(), strict=True):
        gains[found] = min(gained, gains.get(found, gained))
    return lost, math.floor(_exact_sum(gains.values())), differ, labelled


def _exact_sum(shares: Iterable[float]) -> Fraction:
    """The exact sum of shares of positions: a whole sum that was rounded up could make lost + gained exceed differ."""
    counts = Counter(shares)
    return sum((n * Fraction(share).limit_denominator(MOST_POSITIONS) for share, n in counts.items()), Fraction(0))


# --- tokens of a sequence (T22) ---------------------------------------------------------------------------------------


def token_sums(logits: Sequence[Tensor], batch: Batch) -> tuple[Tensor, int]:
    """Sums over the predicted tokens of a batch, given the logits of a network and perhaps those of the dense one.

    They are the number of tokens, the network's loss, the dense loss, KL, and equal predictions; and the longest
    sequence.
    """
    tokens_nT = _tokens_of(batch)
    for logits_nTV in logits:
        _check_token_logits(logits_nTV, batch)
    if logits[0].shape[:2] != tokens_nT.shape or logits[-1].shape != logits[0].shape:
        shapes = " and ".join(str(tuple(logits_nTV.shape)) for logits_nTV in logits)
        raise ModelError(
            f"the logits are {shapes} for {tuple(tokens_nT.shape)} tokens",
            where=batch.where,
            fix="give a causal language model, whose logits at a position predict the next token",
        )
    if bool(((tokens_nT < 0) | (tokens_nT >= logits[0].shape[2])).any()):
        raise DataError(f"a token lies outside 0 .. {logits[0].shape[2] - 1}", where=batch.where)
    real_nT = _real_positions(batch, tokens_nT.shape, logits[0].device)
    counted = real_nT[:, 1:] & real_nT[:, :-1]
    per_token = [counted, *(_token_losses(logits_nTV, tokens_nT) for logits_nTV in logits)]
    if len(logits) == 2:
        kl, differs = _token_changes(*(logits_nTV[:, :-1] for logits_nTV in reversed(logits)))
        per_token += [kl, ~differs]
    sums = [torch.where(counted, values.double(), 0.0).sum().cpu() for values in per_token]
    return torch.stack(sums + [torch.zeros_like(sums[0])] * (5 - len(sums))), tokens_nT.shape[1]


def _check_token_logits(logits: Tensor, batch: Batch) -> None:
    """Raises a ModelError if an output is not n x tokens x vocabulary."""
    if logits.ndim != 3 or logits.shape[2] < 2:
        raise ModelError(
            f"outputs are {tuple(logits.shape)}, not batch x tokens x vocabulary",
            where=batch.where,
            fix="select the logits of a language model with output=",
            option="output",
        )


def _tokens_of(batch: Batch) -> Tensor:
    """The token numbers of a batch (n x T)."""
    tokens = batch.kwargs.get(TOKENS, batch.args[0] if batch.args else None)
    is_tokens = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    if not is_tokens:
        what = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise DataError(
            f"its first input is {what}, not token numbers (batch x tokens)",
            where=batch.where,
            fix=f"give the result of sipp.text, or dicts with {TOKENS}",
        )
    return tokens.long()  # type: ignore[union-attr]


def _real_positions(batch: Batch, shape: torch.Size, device: torch.device) -> Tensor:
    """Which positions count (n x T): all but padding."""
    if batch.real_BT is not None and batch.real_BT.shape == shape:
        return batch.real_BT.to(device, torch.bool)
    return torch.ones(shape, dtype=torch.bool, device=device)


def _token_losses(logits_nTV: Tensor, tokens_nT: Tensor) -> Tensor:
    """-log p of each token but the first, from the logits before it (n x (T - 1), float64, nats)."""
    rows, next_ = logits_nTV[:, :-1].flatten(0, 1), tokens_nT[:, 1:].flatten().to(logits_nTV.device)
    losses = [
        -part.to(_precise(part)).log_softmax(1).gather(1, wanted[:, None])[:, 0].double()
        for part, wanted in zip(rows.split(_step(rows)), next_.split(_step(rows)))
    ]
    return torch.cat(losses).reshape(len(tokens_nT), -1)


def _token_changes(dense_nTV: Tensor, pruned_nTV: Tensor) -> tuple[Tensor, Tensor]:
    """At each position, KL(dense || pruned) of the next token (n x T, float64, nats), and whether another is predicted.

    With non-finite logits KL is infinite, and the prediction counts as changed.
    """
    pairs = [rows.flatten(0, 1) for rows in (dense_nTV, pruned_nTV)]
    kl, differs = [], []
    for f, g in zip(*(rows.split(_step(rows)) for rows in pairs)):
        is_fine = f.isfinite().all(1) & g.isfinite().all(1)
        log_f, log_g = (part.to(_precise(part)).log_softmax(1) for part in (f, g))
        p = log_f.exp()
        divergence = torch.where(p > 0, p * (log_f - log_g), 0.0).sum(1, dtype=torch.float64)
        divergence = divergence.clamp(min=0.0)  # rounding may make an equal pair negative
        kl.append(torch.where(is_fine, divergence, torch.inf))
        differs.append((f.argmax(1) != g.argmax(1)) | ~is_fine)
    shape = dense_nTV.shape[:2]
    return torch.cat(kl).reshape(shape), torch.cat(differs).reshape(shape)


def mean_at(values_nT: Tensor, real_nT: Tensor) -> Tensor:
    """The mean of each sequence over the positions that count (n, float64)."""
    zero = torch.zeros((), dtype=torch.float64, device=values_nT.device)
    return torch.where(real_nT, values_nT.double(), zero).sum(1) / real_nT.sum(1)


def _step(rows: Tensor) -> int:
    return max(1, CHUNK // rows.shape[1])


def _precise(logits: Tensor) -> torch.dtype:
    """float32 at least."""
    return torch.promote_types(logits.dtype, torch.float32)
