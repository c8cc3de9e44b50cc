"""How many channels each site keeps: the cheapest next removal until the network costs no more than asked (T23)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.errors import OptionError
from sipp.runtime.shrinking.sites import Size

Widths = list[int]
SMALLEST = 1e-300  # a divisor


def levels_of(width: int, multiple_of: int) -> Widths:
    """The widths that a site may have, from all of its channels down; at least one stays."""
    smaller = range((width - 1) // multiple_of * multiple_of, 0, -multiple_of)
    return [width, *smaller]


def cheapest_widths(
    full: Sequence[int], errors: Sequence[Tensor], sizes: Sequence[Size], most: float, multiple_of: int
) -> Widths:
    """The widths after the cheapest removals, whose sizes add up to at most `most`.

    `errors` are those of the output, by the number of channels removed. The next removal is the one with the least
    error for what it saves; several channels of a site are taken together if that is cheaper for each.
    """
    levels = [levels_of(width, multiple_of) for width in full]
    curves = [error[[level[0] - width for width in level]] for error, level in zip(errors, levels)]
    touched = [[size for size in sizes if site in size.sites] for site in range(len(full))]
    at, widths = [0] * len(full), list(full)
    total = sum(size.at(widths) for size in sizes)
    while total > most:
        best: tuple[float, int, int, float] | None = None
        for site, level in enumerate(levels):
            if at[site] + 1 == len(level):
                continue
            here, n = at[site], torch.tensor(level, device="cpu")
            slopes = (curves[site][here + 1 :] - curves[site][here]) / (level[here] - n[here + 1 :])
            slope = float(slopes.min())
            saved = _saved(touched[site], widths, site, level[here + 1])
            price = slope * (level[here] - level[here + 1]) / max(saved, SMALLEST)
            if saved > 0 and (best is None or price < best[0]):
                best = price, site, here + 1, saved
        if best is None:
            raise _cannot_reach(most, total)
        _, site, at[site], saved = best
        widths[site] = levels[site][at[site]]
        total -= saved
    return widths


def uniform_widths(full: Sequence[int], sizes: Sequence[Size], most: float, multiple_of: int) -> Widths:
    """The largest widths that keep the same share of every site, and whose sizes add up to at most `most`."""
    levels = [levels_of(width, multiple_of) for width in full]
    shares = sorted({width / level[0] for level in levels for width in level}, reverse=True)
    for share in shares:
        widths = [next((width for width in level if width <= share * level[0]), level[-1]) for level in levels]
        if (total := sum(size.at(widths) for size in sizes)) <= most:
            return widths
    raise _cannot_reach(most, total)


def _saved(sizes: Sequence[Size], widths: Widths, site: int, width: int) -> float:
    fewer = [*widths]
    fewer[site] = width
    return sum(size.at(widths) - size.at(fewer) for size in sizes)


def _cannot_reach(most: float, least: float) -> OptionError:
    return OptionError(
        f"the channels that can go leave {least:,.0f}, more than the {most:,.0f} asked for",
        fix="ask for more; print(sipp.shrink(model, example)) names what keeps its channels",
    )
