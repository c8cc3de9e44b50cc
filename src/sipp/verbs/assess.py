"""`assess`: makes the record of `prune` for a network that was pruned elsewhere, or for masks (T17)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from sipp.bounds import check_same_architecture
from sipp.errors import OptionError
from sipp.inputs import AnyData, copy_of, unwrap
from sipp.pruning import cut_of, hold, rank, release
from sipp.results import GIVEN, Mode, NetworkLike, Pruned, PruneOptions, SeenInputs, Selector, check, network_of
from sipp.scoring import task_of
from sipp.verbs.record import pruned_of


@torch.inference_mode(False)
def assess(
    dense: nn.Module,
    pruned: NetworkLike | Mapping[str, Tensor],
    data: AnyData,
    *,
    exclude: Selector | None = None,
    bound: Mode = "paper",
    holdout: AnyData | None = None,
    progress: bool = True,
) -> Pruned:
    """Returns the same record as `prune`, for a network that was pruned or repaired by any means.

    `pruned` is the network `dense` with other weights (a different network is a ModelError), a result that holds it, or
    masks {parameter name: bool tensor}, True = kept, as for `hold`; weights without a mask are kept.
    `data` may contain the inputs that the mask was chosen with. The `holdout`, which `bound="sound"` needs, may not.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> assessed = sipp.assess(net, {"0.weight": torch.rand(16, 8) > 0.2}, torch.rand(300, 8))
        >>> assessed.method, assessed.kept == assessed.budget, assessed.layers[1].eps
        ('given', True, 0.0)
    """
    check.choice("bound", bound, get_args(Mode))
    if bound == "sound" and holdout is None:
        raise OptionError("bound='sound' needs a holdout here: inputs that played no part in the pruning")
    dense = unwrap(dense)
    if isinstance(pruned, Mapping):
        given = copy_of(dense)
        hold(given, pruned)
        release(given)
    else:
        given = unwrap(network_of(pruned))
        check_same_architecture(dense, given)
    task = task_of(dense, data, exclude=exclude, warns=False)
    # sipp-det: its scores are the sensitivities
    ranking = rank(task, PruneOptions(method="sipp-det"), progress=progress, needs_bounds=True, warns=False)
    unknown = SeenInputs(frozenset(), is_all=False)  # what chose the caller's own weights
    ranking = replace(ranking, method_name=GIVEN, seen=unknown)
    network_cut = cut_of(ranking, given, pruned if isinstance(pruned, Mapping) else {}, seed=0)
    return pruned_of(ranking, network_cut, task, mode=bound, new_points=holdout)
