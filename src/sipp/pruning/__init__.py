"""Ranks weights, cuts a copy of the model to a budget, and holds masks during training."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.pruning.cutting import (
        Cut as Cut,
        budget_for as budget_for,
        cut as cut,
        cut_of as cut_of,
        measured_change as measured_change,
    )
    from sipp.pruning.given_masks import (
        WithMasks as WithMasks,
        masks_in as masks_in,
    )
    from sipp.pruning.lora import (
        lora_merged as lora_merged,
    )
    from sipp.pruning.masking import (
        hold as hold,
        masks_of as masks_of,
        release as release,
    )
    from sipp.pruning.ranking import (
        Ranking as Ranking,
        is_large_linear_network as is_large_linear_network,
        rank as rank,
        starts_from_wanda as starts_from_wanda,
    )
    from sipp.pruning.rows import (
        best_within as best_within,
        even_layers as even_layers,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
