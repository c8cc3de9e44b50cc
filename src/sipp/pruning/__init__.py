"""Ranks weights, cuts a copy of the model to a budget, and holds masks during training."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.pruning.cutting import (
        Cut as Cut,
        budget_for as budget_for,
        cut as cut,
        cut_as_given as cut_as_given,
        dead_rows as dead_rows,
        output_change as output_change,
    )
    from sipp.pruning.given_masks import (
        WithMasks as WithMasks,
        masked_by_torch as masked_by_torch,
        masks_in as masks_in,
    )
    from sipp.pruning.lora import (
        lora_merged as lora_merged,
    )
    from sipp.pruning.masking import (
        checked_optimizers as checked_optimizers,
        hold_masks as hold_masks,
        masks_of as masks_of,
        release as release,
    )
    from sipp.pruning.ranking import (
        MOST_WEIGHTS_OF_SMALL as MOST_WEIGHTS_OF_SMALL,
        Ranking as Ranking,
        hold_back_points as hold_back_points,
        is_like_a_language_model as is_like_a_language_model,
        needs_first_mask_only as needs_first_mask_only,
        rank as rank,
    )
    from sipp.pruning.rows import (
        RAND as RAND,
        STRATEGIES as STRATEGIES,
        eps_given as eps_given,
        even_layers as even_layers,
        largest as largest,
        largest_above_floor as largest_above_floor,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
