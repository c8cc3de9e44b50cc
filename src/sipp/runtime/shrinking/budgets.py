"""How many channels each site keeps: the cheapest next removal until the network costs no more than asked (T23)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.runtime.shrinking.sites import Size

Widths = list[int]


def levels_of(width: int, multiple_of: int) -> Widths:
    """The widths that a site may have, from all of its channels down; at least one stays."""
    smaller = range((width - 1) // multiple_of * multiple_of, 0, -multiple_of)
    return [width, *smaller]


def least_share(full: Sequence[int], sizes: Sequence[Size], multiple_of: int) -> float:
    """The share of all sizes that stays if every site keeps as few channels as it may."""
    least = [levels_of(width, multiple_of)[-1] for width in full]
    return sum(size.at(least) for size in sizes) / sum(size.at(full) for size in sizes)


def cheapest_widths(
    full: Sequence[int], errors: Sequence[Tensor], sizes: Sequence[Size], share: float, multiple_of: int
) -> Widths:
    """The widths after the cheapest removals, whose sizes add up to at most this share (see `least_share`).

    `errors` are those of the output, by the number of channels removed. The next removal is the one with the least
    error for what it saves; several channels of a site are taken together if that is cheaper for each.
    """
    levels = [levels_of(width, multiple_of) for width in full]
    touched = [[size for size in sizes if site in size.sites] for site in range(len(full))]
    near = [{other for size in some for other in size.sites} for some in touched]
    at, widths = [0] * len(full), list(full)
    prices: dict[int, float] = {}

    def price(site: int) -> float:
        """The error for each unit that the next removal at this site saves."""
        level, here = levels[site], at[site]
        if here + 1 == len(level):
            return math.inf
        removed = full[site] - torch.tensor(level[here:], dtype=torch.int64, device="cpu")
        added, n = (values[1:] - values[0] for values in (errors[site][removed], removed))
        fewer = [*widths]
        fewer[site] = level[here + 1]
        saved = sum(size.at(widths) - size.at(fewer) for size in touched[site])
        return float((added / n).min()) * (level[here] - level[here + 1]) / saved if saved > 0 else math.inf

    most = share * sum(size.at(full) for size in sizes)
    while sum(size.at(widths) for size in sizes) > most:
        prices |= {site: price(site) for site in range(len(full)) if site not in prices}
        site = min(prices, key=prices.__getitem__)
        at[site] += 1
        widths[site] = levels[site][at[site]]
        prices = {other: known for other, known in prices.items() if other not in near[site]}
    return widths


def uniform_widths(full: Sequence[int], sizes: Sequence[Size], share: float, multiple_of: int) -> Widths:
    """The largest widths that keep the same share of every site, and whose sizes add up to at most this share."""
    levels = [levels_of(width, multiple_of) for width in full]
    most = share * sum(size.at(full) for size in sizes)
    for kept in sorted({width / level[0] for level in levels for width in level}, reverse=True):
        widths = [next((width for width in level if width <= kept * level[0]), level[-1]) for level in levels]
        if sum(size.at(widths) for size in sizes) <= most:
            break
    return widths
