"""Measures what pruning costs on new inputs, and certifies it (T14-T16)."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.certificates.claims import (
        AccuracyClaim as AccuracyClaim,
        OutputClaim as OutputClaim,
        claim_of as claim_of,
    )
    from sipp.certificates.compared_output import (
        Output as Output,
        check_model as check_model,
        model_output as model_output,
    )
    from sipp.certificates.comparing import (
        NetworkComparison as NetworkComparison,
        compare_networks as compare_networks,
    )
    from sipp.certificates.evidence import (
        DenseOutputs as DenseOutputs,
        holdout_data as holdout_data,
        refuse_shared as refuse_shared,
    )
    from sipp.certificates.measures import token_sums as token_sums
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
