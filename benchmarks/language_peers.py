"""Wanda and SparseGPT for language models in plain torch, from their papers: what ours are compared with.

Nothing of the package is used. As both papers do: the blocks of the model one after another, each calibrated on what
the pruned blocks before it give; every linear layer of a block keeps the same share. Wanda (Sun et al. 2024): |w| ||x||
compared within a row. SparseGPT (Frantar and Alistarh 2023): columns from left to right in blocks of 128, the weights
of the least (w / [H^-1]_jj)^2 go, and what a column loses is made up for by those right of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

DAMPING, COLUMNS = 0.01, 128
Prune = Callable[[Tensor, Tensor], Tensor]  # weights (rows x inputs) and X'X -> the pruned weights
Name = Literal["wanda", "sparsegpt"]


@torch.no_grad()
def pruned_by(name: Name, model: nn.Module, sequences: Tensor, keep: float | str, batch: int = 8) -> nn.Module:
    """A copy of the model with this share of the weights of its blocks, or n of every m ("2:4")."""
    made = copy.deepcopy(model).eval()
    one = _wanda if name == "wanda" else _sparsegpt
    _block_by_block(made, sequences, lambda weight, gram: one(weight, gram, keep), batch)
    return made


def _block_by_block(model: nn.Module, sequences: Tensor, prune: Prune, batch: int) -> None:
    device = next(model.parameters()).device
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    states, calls = _first_states(model, blocks[0], [part.to(device) for part in sequences.split(batch)])
    for block in blocks:
        layers = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        grams = {n: torch.zeros(m.in_features, m.in_features, device=device) for n, m in layers.items()}

        def gather(module: nn.Module, args: tuple[Any, ...], name: str = "") -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            grams[name] += x.T @ x  # noqa: B023

        hooks = [
            m.register_forward_pre_hook(lambda module, args, n=n: gather(module, args, n)) for n, m in layers.items()
        ]
        for state, call in zip(states, calls):
            block(state, **call)
        for hook in hooks:
            hook.remove()
        for name, layer in layers.items():
            layer.weight.copy_(prune(layer.weight.float(), grams.pop(name)).to(layer.weight.dtype))
        for i, call in enumerate(calls):
            found = block(states[i], **call)
            states[i] = found[0] if isinstance(found, tuple) else found


class _ReachedError(Exception):
    """Ends a pass at the first block."""


def _first_states(
    model: nn.Module, block: nn.Module, batches: list[Tensor]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """What the first block is called with, batch by batch."""
    states: list[Tensor] = []
    calls: list[dict[str, Any]] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs.pop("hidden_states"))
        calls.append(kwargs)
        raise _ReachedError

    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    for one in batches:
        with suppress(_ReachedError):
            model(one, use_cache=False)
    handle.remove()
    return states, calls


def _wanda(weight: Tensor, gram: Tensor, keep: float | str) -> Tensor:
    score = weight.abs() * gram.diagonal().sqrt()
    if isinstance(keep, str):
        n, m = map(int, keep.split(":"))
        grouped = score.unflatten(1, (-1, m))
        kept = torch.zeros_like(grouped, dtype=torch.bool).scatter(2, grouped.topk(n, 2).indices, True).flatten(1)
    else:
        n_gone = int(weight.shape[1] * (1 - keep))
        gone = score.argsort(dim=1, stable=True)[:, :n_gone]
        kept = torch.ones_like(score, dtype=torch.bool).scatter(1, gone, False)
    return torch.where(kept, weight, 0.0)


def _sparsegpt(weight: Tensor, gram: Tensor, keep: float | str) -> Tensor:
    weight, gram = weight.clone(), gram.clone()
    dead = gram.diagonal() == 0
    gram.diagonal()[dead] = 1
    weight[:, dead] = 0
    gram.diagonal().add_(DAMPING * gram.diagonal().mean())
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)
    n_columns = weight.shape[1]
    for start in range(0, n_columns, COLUMNS):
        stop = min(start + COLUMNS, n_columns)
        part, pivots = weight[:, start:stop].clone(), factor.diagonal()[start:stop]
        inner, lost = factor[start:stop, start:stop], torch.zeros_like(part)
        kept = torch.ones_like(part, dtype=torch.bool)
        if not isinstance(keep, str):
            score = (part / pivots).square()
            threshold = score.flatten().sort().values[int(score.numel() * (1 - keep))]
            kept = score > threshold
        for i in range(stop - start):
            if isinstance(keep, str):
                n, m = map(int, keep.split(":"))
                if i % m == 0:
                    score = (part[:, i : i + m] / pivots[i : i + m]).square()
                    kept[:, i : i + m] = torch.zeros_like(score, dtype=torch.bool).scatter(
                        1, score.topk(n, 1).indices, True
                    )
            now = torch.where(kept[:, i], part[:, i], 0.0)
            lost[:, i] = (part[:, i] - now) / inner[i, i]
            part[:, i:] -= lost[:, i : i + 1] * inner[i, i:]
            part[:, i] = now
        weight[:, start:stop] = part
        weight[:, stop:] -= lost @ factor[start:stop, stop:]
    return weight
