"""Which channels can be removed for good although they are used, and what each costs (T23).

A `Site` is a set of channels that exactly one layer reads: inside of a residual block, between two layers of a chain,
the hidden units of an MLP. It follows from the same ties as dead channels do (channels.py): what is tied goes together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.results import numerics
from sipp.runtime.shrinking.channels import ALWAYS, Channels
from sipp.runtime.shrinking.removing import classes_of

STREAM = "several layers read them (a residual stream)"


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
    """The sites of a network, what depends on them, and the weights whose channels stay, with the reason."""

    sites: tuple[Site, ...]
    class_of: Tensor  # of each id
    site_of: dict[int, tuple[int, int]]  # the site of each class that is in one, and its number there
    refused: dict[str, str]


def structure_of(channels: Channels, excluded: Collection[str] = ()) -> Structure:
    """The sites of a network; the weights `excluded` keep all their inputs."""
    refused: dict[str, str] = {}
    class_of = classes_of(channels, list(_more_ties(channels, refused)))
    readers, makers = defaultdict[int, set[str]](set), defaultdict[int, set[str]](set)
    for product in channels.products:
        if product.groups == 1:  # a depthwise layer hands its channels on
            for name in set(class_of[product.ids].tolist()):
                readers[name].add(product.weight)
        for name in set(class_of[product.out_ids].tolist()):
            makers[name].add(product.weight)
    members = defaultdict[tuple[str, frozenset[str]], list[int]](list)
    n_uses = Counter(product.weight for product in channels.products)
    for name in sorted(readers.keys() & makers.keys() - {int(class_of[ALWAYS])}):
        reader = min(readers[name])
        why = ""
        if len(readers[name]) > 1:
            why = STREAM
        elif n_uses[reader] > 1 or channels.n_reads[reader] > 1 or reader in channels.fixed:
            why = f"{reader}, which reads them, is used more than once"
        elif reader in excluded:
            why = f"{reader}, which reads them, is excluded"
        if why:
            refused |= dict.fromkeys(sorted(makers[name]), why)
        else:
            members[reader, frozenset(makers[name])].append(name)
    return _with_sites(channels, class_of, members, refused)


def _with_sites(
    channels: Channels,
    class_of: Tensor,
    members: Mapping[tuple[str, frozenset[str]], list[int]],
    refused: dict[str, str],
) -> Structure:
    """The structure, with one site for all classes that the same weights make and read."""
    sites, site_of = list[Site](), dict[int, tuple[int, int]]()
    inputs = {product.weight: class_of[product.ids] for product in channels.products}
    order = {product.weight: i for i, product in enumerate(channels.products)}
    size_of: dict[str, int] = {}
    for (reader, making), names in sorted(members.items(), key=lambda item: (order[item[0][0]], -len(item[1]))):
        columns = [(inputs[reader] == name).nonzero().flatten() for name in names]
        size = size_of.setdefault(reader, len(columns[0]))  # groups are compared, so they are of one size
        if any(len(found) != size for found in columns):
            refused |= dict.fromkeys(sorted(making), f"{reader} reads some of them more often than others")
            continue
        site_of |= {name: (len(sites), at) for at, name in enumerate(names)}
        sites.append(Site(reader, tuple(sorted(making, key=order.__getitem__)), torch.stack(columns)))
    return Structure(tuple(sites), class_of, site_of, refused)


def _more_ties(channels: Channels, refused: dict[str, str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Channels on both sides of a depthwise layer go together; those of other grouped layers stay, with the reason."""
    for product in channels.products:
        n_groups = product.groups
        if n_groups > 1 and n_groups == len(product.ids):
            yield product.ids.repeat_interleave(len(product.out_ids) // n_groups), product.out_ids
        elif n_groups > 1 or product.is_transposed:
            refused[product.weight] = "its groups must stay equal" if n_groups > 1 else "it is a transposed convolution"
            for ids in (product.ids, product.out_ids):
                yield ids, torch.full_like(ids, ALWAYS)


def rows_left(channels: Channels, structure: Structure, weight: str, left: Sequence[Tensor]) -> Tensor:
    """Which outputs of a weight stay if these channels of each site do (float64: 0 or 1)."""
    ids = structure.class_of[channels.side(weight, 0)].tolist()
    places = [structure.site_of.get(one) for one in ids]
    return torch.tensor(
        [1.0 if at is None else float(left[at[0]][at[1]]) for at in places], dtype=numerics.BOUND_DTYPE, device="cpu"
    )


def sizes_of(channels: Channels, structure: Structure, full: Mapping[str, int]) -> list[Size]:
    """How these sizes (of tensors by name) follow from the widths of the sites."""
    found = []
    for name, n in full.items():
        dims = []
        for dim in range(channels.tensors[name].ndim if name in channels.tensors else 0):
            ids = channels.sides.get((name, dim))
            if ids is None:
                continue
            found_at = [structure.site_of.get(one) for one in structure.class_of[ids].tolist()]
            counts = Counter(at[0] for at in found_at if at is not None)
            parts = tuple((site, n_entries // structure.sites[site].width) for site, n_entries in counts.items())
            if parts:
                dims.append((len(ids), found_at.count(None), parts))
        found.append(Size(n, tuple(dims)))
    return found
