"""Ranks weights, cuts a copy of the model to a budget, and holds masks during training."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.pruning.blending import (
        n_candidates as n_candidates,
    )
    from sipp.pruning.cutting import (
        Cut as Cut,
        budget_for as budget_for,
        cut as cut,
        cut_as_given as cut_as_given,
        cut_rows as cut_rows,
        dead_rows as dead_rows,
        masks_by_name as masks_by_name,
        output_change as output_change,
        prepare_rows as prepare_rows,
        write_rows as write_rows,
    )
    from sipp.pruning.given_masks import (
        WithMasks as WithMasks,
        masks_in as masks_in,
    )
    from sipp.pruning.largest_scores import (
        even_layers as even_layers,
        largest as largest,
        largest_above_floor as largest_above_floor,
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
    from sipp.pruning.ranked import (
        MOST_WEIGHTS_OF_SMALL as MOST_WEIGHTS_OF_SMALL,
        Ranking as Ranking,
        is_like_a_language_model as is_like_a_language_model,
    )
    from sipp.pruning.ranking import (
        hold_back_points as hold_back_points,
        masks_within as masks_within,
        needs_first_mask_only as needs_first_mask_only,
        only_alive as only_alive,
        rank as rank,
    )
    from sipp.pruning.sparse_rows import (
        RAND as RAND,
        STRATEGIES as STRATEGIES,
        eps_given as eps_given,
    )
    from sipp.pruning.torch_masks import (
        masked_by_torch as masked_by_torch,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
