"""The result of `shrink`: a smaller network, what it saves, and whether its outputs are the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from sipp.results import hashing, words
from sipp.results.bounds import Guarantee
from sipp.results.certificate import AnyCertificate
from sipp.results.jsonio import NOT_JSON
from sipp.results.pruned import PrunedLayer, SeenInputs
from sipp.results.repair import Polish
from sipp.results.sheet import Sheet, Table, shown

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShrunkLayer:
    """One weight before and after. Multiply-adds are those of one call with the example."""

    name: str
    before: Shape
    after: Shape
    multiply_adds_before: int
    multiply_adds: int

    @property
    def shape_before(self) -> str:
        return " x ".join(map(str, self.before))

    @property
    def shape(self) -> str:
        return " x ".join(map(str, self.after))


@dataclass(frozen=True)
class ChannelsLeft:
    """Channels between layers: outputs of the weights `makers` that only the weight `reader` reads."""

    makers: tuple[str, ...]
    reader: str
    before: int
    after: int
    removed: tuple[int, ...]  # the inputs of `reader` that are gone (dimension 1 of its weight)


@dataclass(frozen=True)
class Chosen:
    """The budget, the channels that were removed, and the change of the outputs.

    `layers` and `guarantee` are the theory's bounds (T17) for the layers of the whole network with zeros in the place
    of the channels that are gone, which computes the same.
    """

    share: float
    of: str  # "multiply-adds" or "parameters"
    sites: tuple[ChannelsLeft, ...]
    stays: tuple[str, ...]  # weights whose channels all stay, and why
    is_refitted: bool
    polish: Polish | None
    n_fit: int  # inputs that the new weights were fitted on
    n_test: int  # inputs that chose nothing; 0: there were too few
    output_error: float | None  # on these, relative to the norm of the dense output; None also without real numbers
    layers: tuple[PrunedLayer, ...] = ()
    guarantee: Guarantee | None = None


@dataclass(frozen=True)
@shown
class Shrunk:
    """A network without its dead channels, or with as few as a budget asked for, and what that saves. `print` it.

    Example:
        >>> import sipp, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> _ = net[0].weight.data[4:].zero_()
        >>> small = sipp.shrink(net, torch.rand(2, 8))
        >>> [(layer.name, layer.before, layer.after) for layer in small.layers]
        [('0.weight', (16, 8), (4, 8)), ('2.weight', (4, 16), (4, 4))]
    """

    model: nn.Module = field(metadata=NOT_JSON)  # the class that was given, with smaller layers
    layers: tuple[ShrunkLayer, ...]  # every weight of a linear layer or a convolution, by one of its names
    n_parameters_before: int
    n_parameters: int
    multiply_adds_before: int  # of one call with the example, including attention and recurrent layers
    multiply_adds: int
    example: str  # the input for which multiply-adds were counted and outputs compared, in words
    off_by: float  # the largest difference of an output on the example, relative to its largest value
    left_alone: tuple[str, ...]  # operations that keep all channels they read, and the modules they are in
    hash_before: str  # of the network before shrinking
    described_hash: str  # of `model` as it was made; this record does not describe other weights
    certificate: AnyCertificate | None = None  # of the network before; None with a budget, which changes outputs
    # inputs that chose the weights of `described_hash`
    seen: SeenInputs = field(default=SeenInputs(), metadata=NOT_JSON)
    chosen: Chosen | None = None  # None: there was no budget, and both networks compute the same

    @property
    def is_as_made(self) -> bool:
        """Whether the weights are unchanged since `shrink`."""
        return hashing.of_model(self.model) == self.described_hash

    @property
    def sheet(self) -> Sheet:
        columns = {
            "weight": "name", "before": "shape_before", "after": "shape",
            "multiply-adds before": "multiply_adds_before", "multiply-adds after": "multiply_adds",
        }  # fmt: skip
        table = Table.of(self.layers, columns, bars=("multiply-adds before", "multiply-adds after"))
        title = "without its dead channels" if self.chosen is None else "with fewer channels"
        return Sheet(f"{type(self.model).__name__} {title}", tuple(_facts(self)), (table,))


def _facts(small: Shrunk) -> list[tuple[str, str]]:
    """The savings, and the certificate."""
    facts = [
        ("parameters", _fewer(small.n_parameters_before, small.n_parameters)),
        ("multiply-adds", f"{_fewer(small.multiply_adds_before, small.multiply_adds)}, for {small.example}"),
        *(_same_outputs(small) if small.chosen is None else _changed_outputs(small.chosen)),
    ]
    if small.left_alone:
        facts.append(("left alone", f"these keep all channels that they read: {words.listed(small.left_alone)}"))
    if small.certificate is not None and small.is_as_made:
        text = f"made for the network before, which computes the same. {small.certificate.sentence}"
        facts.append(("certificate", text))
    return facts


def _same_outputs(small: Shrunk) -> list[tuple[str, str]]:
    return [("outputs", f"the same on this example, up to rounding ({small.off_by:.0e} of the largest)")]


def _changed_outputs(chosen: Chosen) -> list[tuple[str, str]]:
    """The budget, the change of the outputs, and the bounds of the layers."""
    made = "refitted to" if chosen.is_refitted else "chosen on"
    polished = "" if chosen.polish is None else f", then {chosen.polish.taken:,} steps towards the dense outputs"
    facts = [("budget", f"{chosen.share:.4g} of the {chosen.of}; {made} {chosen.n_fit:,} inputs{polished}")]
    if chosen.output_error is not None:
        text = f"off by {chosen.output_error:.2%} of their length on {chosen.n_test:,} inputs held back"
        facts.append(("outputs", text))
    bounded = [layer for layer in chosen.layers if layer.bound is not None and layer.bound < 1]
    if chosen.layers:
        facts.append(("bounds", f"{len(bounded)} of {len(chosen.layers)} layers have a bound below 100 %"))
    if chosen.guarantee is not None and chosen.guarantee.reason:
        facts.append(("bounds not met", chosen.guarantee.reason))
    if chosen.stays:
        facts.append(("all channels stay", words.listed(chosen.stays)))
    return facts


def _fewer(before: int, after: int) -> str:
    return f"{before:,} -> {after:,} ({before / max(1, after):.2f} x fewer)"
