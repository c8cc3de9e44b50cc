"""Measures what pruning costs on new inputs, and certifies it (T14-T16)."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.certificates.claims import (
        Tolerance as Tolerance,
        accuracy_claim as accuracy_claim,
        output_claim as output_claim,
        tolerance_of as tolerance_of,
    )
    from sipp.certificates.evidence import (
        holdout_data as holdout_data,
        measure_outputs as measure_outputs,
        refuse_shared as refuse_shared,
    )
    from sipp.certificates.measures import (
        PointComparisons as PointComparisons,
        compare_outputs as compare_outputs,
        measure_of as measure_of,
        outcomes_of as outcomes_of,
    )
    from sipp.certificates.running import (
        Output as Output,
        check_model as check_model,
        model_output as model_output,
    )
    from sipp.certificates.tokens import (
        check_token_logits as check_token_logits,
        real_positions as real_positions,
        token_changes as token_changes,
        token_losses as token_losses,
        tokens_of as tokens_of,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
