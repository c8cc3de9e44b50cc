"""Which channels can be removed for good although they are used, the error of each, and how many a budget leaves (T23).

A `Site` is a set of channels that exactly one layer reads: inside of a residual block, between two layers of a chain,
the hidden units of an MLP, the heads of attention. It follows from the same classes as dead channels do.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.runtime.shrinking.dependencies import ALWAYS, Channels

STREAM = "several layers read them (a residual stream)"
Widths = list[int]


@dataclass(frozen=True)
class Site:
    """Channels that can be removed one by one, with all that makes them and the inputs of the layer that reads them."""

    reader: str  # the weight that reads them
    makers: tuple[str, ...]  # the weights whose rows they are
    columns_GC: Tensor  # of the reader's inputs (dimension 1 of its weight), those of each channel

    @property
    def width(self) -> int:
        return len(self.columns_GC)


@dataclass(frozen=True)
class Size:
    """How the size of a tensor, or what it costs to use it, follows from the number of channels left at each site."""

    full: int
    dims: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]  # all, those of no site, (site, entries per channel)

    def at(self, widths: Sequence[int]) -> float:
        share = 1.0
        for n_all, n_fixed, parts in self.dims:
            share *= (n_fixed + sum(widths[site] * times for site, times in parts)) / n_all
        return self.full * share

    @property
    def sites(self) -> set[int]:
        return {site for _, _, parts in self.dims for site, _ in parts}


@dataclass(frozen=True)
class Structure:
    """The sites of a network, and the weights whose channels stay, with the reason."""

    channels: Channels
    sites: tuple[Site, ...]
    class_of: Tensor  # of each id
    site_of: dict[int, int]  # the site of each class that is in one
    refused: dict[str, str]

    def sizes(self, full: Mapping[str, int]) -> list[Size]:
        """How these sizes (of tensors by name) follow from the widths of the sites."""
        dims = defaultdict[str, list[tuple[int, int, tuple[tuple[int, int], ...]]]](list)
        for (name, _), ids in self.channels.sides.items():
            counts = Counter(self.site_of.get(one) for one in self.class_of[ids].tolist())
            n_fixed = counts.pop(None, 0)
            parts = tuple((site, n // self.sites[site].width) for site, n in counts.items() if site is not None)
            if parts:
                dims[name].append((len(ids), n_fixed, parts))
        return [Size(n, tuple(dims[name])) for name, n in full.items()]


def structure_of(channels: Channels, excluded: Collection[str] = ()) -> Structure:
    """The sites of a network; the weights `excluded` keep all their inputs and outputs."""
    class_of, products = channels.classes, channels.products
    readers, makers = defaultdict[int, set[str]](set), defaultdict[int, set[str]](set)
    for product in products:
        for name in set(class_of[product.ids].tolist()):
            readers[name].add(product.weight)
        for name in set(class_of[product.out_ids].tolist()):
            makers[name].add(product.weight)
    n_uses = Counter(product.weight for product in products)
    members, refused = defaultdict[tuple[str, frozenset[str]], list[int]](list), dict[str, str]()
    for name in sorted(readers.keys() & makers.keys() - {int(class_of[ALWAYS])}):
        reader, why = min(readers[name]), ""
        if len(readers[name]) > 1:
            why = STREAM
        elif n_uses[reader] > 1 or channels.n_reads[reader] > 1 or reader in channels.fixed:
            why = f"{reader}, which reads them, is used more than once"
        elif reader in excluded:
            why = f"{reader}, which reads them, is excluded"
        elif not makers[name].isdisjoint(excluded):
            why = f"{min(makers[name].intersection(excluded))} is excluded"
        if why:
            refused |= dict.fromkeys(sorted(makers[name]), why)
        else:
            members[reader, frozenset(makers[name])].append(name)
    sites, site_of, size_of = list[Site](), dict[int, int](), dict[str, int]()
    inputs = {product.weight: class_of[product.ids] for product in products}
    order = {product.weight: i for i, product in enumerate(products)}
    for (reader, making), names in sorted(members.items(), key=lambda item: (order[item[0][0]], -len(item[1]))):
        columns = [(inputs[reader] == name).nonzero().flatten() for name in names]
        size = size_of.setdefault(reader, len(columns[0]))  # groups are compared, so they are of one size
        if any(len(found) != size for found in columns):
            refused |= dict.fromkeys(sorted(making), f"{reader} reads some of them more often than others")
            continue
        site_of |= dict.fromkeys(names, len(sites))
        sites.append(Site(reader, tuple(sorted(making, key=order.__getitem__)), torch.stack(columns)))
    return Structure(channels, tuple(sites), class_of, site_of, refused)


# --- How many channels each site keeps --------------------------------------------------------------------------------


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


def uniform_widths(
    full: Sequence[int],
    sizes: Sequence[Size],
    share: float,
    multiple_of: int,
    can_be: Callable[[Widths], bool] = lambda widths: True,
) -> Widths:
    """The largest widths that keep the same share of every site, and whose sizes add up to at most this share.

    Of those that `can_be`, if there are any.
    """
    levels = [levels_of(width, multiple_of) for width in full]
    most = share * sum(size.at(full) for size in sizes)
    shares = sorted({width / level[0] for level in levels for width in level}, reverse=True)
    tried = [[next((w for w in level if w <= kept * level[0]), level[-1]) for level in levels] for kept in shares]
    small = [widths for widths in tried if sum(size.at(widths) for size in sizes) <= most]
    return next(filter(can_be, small), small[0])
