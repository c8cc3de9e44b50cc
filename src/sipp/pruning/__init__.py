"""Ranks weights, cuts a copy of the model to a budget, and holds masks during training."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.pruning.blending import (
        BlendInputs as BlendInputs,
        blend_inputs as blend_inputs,
        choose_blend as choose_blend,
    )
    from sipp.pruning.budgets import (
        AllocationProblem as AllocationProblem,
        allocation_problem as allocation_problem,
        sampling_constant as sampling_constant,
    )
    from sipp.pruning.cutting import (
        Cut as Cut,
        Ranking as Ranking,
        budget_for as budget_for,
        cut as cut,
        cut_of as cut_of,
        is_large_linear_network as is_large_linear_network,
        measured_change as measured_change,
        rank as rank,
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
    from sipp.pruning.rows import (
        best_within as best_within,
        even_layers as even_layers,
    )
    from sipp.pruning.sampling import (
        sampled_rows as sampled_rows,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
