"""`page(pruned, certificate)`: writes the page of `sipp report` for networks pruned from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from sipp.errors import OptionError
from sipp.files import check_file, write_atomic
from sipp.report.compare_networks import network_articles
from sipp.report.networks import PrunedModel
from sipp.report.rendering import render
from sipp.results import (
    AnyCertificate,
    Gradual,
    Pruned,
    PrunedTo,
    SavedNetwork,
    Shrunk,
    certificate_of,
    check,
    record_of,
)

PruneResult = Pruned | PrunedTo
Networks = PruneResult | Sequence[PruneResult] | Mapping[str, PruneResult]
NOT_OF_PRUNE = {  # what to do instead with a network that is no result of `prune`
    Gradual: "give sipp.assess(dense, net, data)",
    Shrunk: "print(small) shows what it saves; sipp.evaluate and sipp.certify compare it with the network before",
}


def page(
    pruned: Networks,
    *certificates: AnyCertificate | None,
    path: str | PathLike[str] = "page.html",
    force: bool = False,
) -> Path:
    """Writes a page about pruned networks and what is certified about them, and returns its path.

    `pruned` is what `prune` or `prune_to` returned, or several of these as a list or as {name: result}. Each
    certificate must be about one of these networks and is shown with it, as is the one that `prune_to` made. The page
    works offline. An existing file is replaced only with `force`.

    Example:
        >>> import sipp, tempfile, torch
        >>> net = torch.nn.Linear(100, 100).eval()
        >>> pruned = sipp.prune(net, None, keep=0.5, method="magnitude")
        >>> certificate = sipp.certify(net, pruned.model, torch.rand(100, 100))
        >>> sipp.page(pruned, certificate, path=tempfile.mkdtemp() + "/page.html").name
        'page.html'
    """
    target = check.path("path", path, "page.html")
    check_file(target, force=True)
    if target.exists() and not check.flag("force", force):
        raise OptionError(f"{target} exists", fix="give another name, or force=True to replace it")
    networks = _by_name(pruned)
    given = [
        check.kind("certificate", claim, AnyCertificate, "give results of sipp.certify, one after the other")
        for claim in certificates
        if claim is not None
    ]
    held = [certificate_of(network, None) for network in networks.values()]
    claims = [claim for claim in dict.fromkeys((*given, *held)) if claim is not None]
    results = [_as_result(name, record_of(network), claims) for name, network in networks.items()]
    known = {model.record.pruned_hash for model in results}
    if any(claim.pruned_hash not in known for claim in claims):
        raise OptionError("a certificate is about none of these networks", fix="pass the network it was made for")
    heading = f"{len(results)} pruning results" if len(results) > 1 else ""
    text = render(network_articles(results), (model.arm for model in results), heading=heading)
    write_atomic(target, text.encode())
    return target


def _by_name(pruned: Networks) -> dict[str, PruneResult]:
    """The networks by name: as given, or the class name, numbered if there are several."""
    several = pruned if isinstance(pruned, (list, tuple)) else [pruned]
    by_name = pruned if isinstance(pruned, Mapping) else dict(enumerate(several, start=1))
    if not by_name:
        raise OptionError("there is no network to show", fix="give a result of sipp.prune")
    for network in by_name.values():
        if not isinstance(network, PruneResult):
            fix = NOT_OF_PRUNE.get(type(network), "give a result of sipp.prune")
            raise OptionError(f"a {type(network).__name__} is not a result of sipp.prune", fix=fix)
    if isinstance(pruned, Mapping):
        return {str(name): network for name, network in by_name.items()}
    kinds = {number: type(network.model).__name__ for number, network in by_name.items()}
    return {kinds[n] if len(by_name) == 1 else f"{kinds[n]} {n}": network for n, network in by_name.items()}


def _as_result(name: str, pruned: Pruned, claims: list[AnyCertificate]) -> PrunedModel:
    """A network as the page shows it: its first certificate in the record, the others beside it."""
    record = SavedNetwork.of(pruned)
    ours = [claim for claim in claims if claim.pruned_hash == record.pruned_hash]
    record = SavedNetwork.of(pruned, ours[0]) if ours else record
    others = {f"certificate {number}": claim for number, claim in enumerate(ours[1:], start=2)}
    return PrunedModel(name, record, others)
