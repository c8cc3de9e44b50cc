"""Token losses, KL divergences and predicted tokens from the logits of a sequence (T22)."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.errors import DataError, ModelError
from sipp.inputs import Batch

TOKENS = "input_ids"  # of a dict batch
CHUNK = 1 << 24  # logits processed at once: they are the largest tensors of a language model


def check_token_logits(logits: Tensor, batch: Batch) -> None:
    """Raises a ModelError if an output is not n x tokens x vocabulary."""
    if logits.ndim != 3 or logits.shape[2] < 2:
        raise ModelError(
            f"outputs are {tuple(logits.shape)}, not batch x tokens x vocabulary",
            where=batch.where,
            fix="select the logits of a language model with output=",
            option="output",
        )


def tokens_of(batch: Batch) -> Tensor:
    """The token numbers of a batch (n x T)."""
    tokens = batch.kwargs.get(TOKENS, batch.args[0] if batch.args else None)
    is_tokens = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
    if not is_tokens:
        what = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise DataError(
            f"its first input is {what}, not token numbers (batch x tokens)",
            where=batch.where,
            fix=f"give what sipp.text gives, or dicts with {TOKENS}",
        )
    return tokens.long()  # type: ignore[union-attr]


def real_positions(batch: Batch, shape: torch.Size, device: torch.device) -> Tensor:
    """Which positions count (n x T): all but padding."""
    if batch.real_BT is not None and batch.real_BT.shape == shape:
        return batch.real_BT.to(device, torch.bool)
    return torch.ones(shape, dtype=torch.bool, device=device)


def token_losses(logits_nTV: Tensor, tokens_nT: Tensor) -> Tensor:
    """-log p of each token but the first, from the logits before it (n x (T - 1), float64, nats)."""
    rows, next_ = logits_nTV[:, :-1].flatten(0, 1), tokens_nT[:, 1:].flatten().to(logits_nTV.device)
    losses = [
        -part.to(_precise(part)).log_softmax(1).gather(1, wanted[:, None])[:, 0].double()
        for part, wanted in zip(rows.split(_step(rows)), next_.split(_step(rows)))
    ]
    return torch.cat(losses).reshape(len(tokens_nT), -1)


def token_changes(dense_nTV: Tensor, pruned_nTV: Tensor) -> tuple[Tensor, Tensor]:
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
