"""Brings a pruned network closer to the dense one: search for masks and weights, refit of kept weights, polish."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.repairing.channels import (
        Sums as Sums,
        eliminate as eliminate,
    )
    from sipp.repairing.data_split import (
        DataSplit as DataSplit,
        split_data as split_data,
    )
    from sipp.repairing.parts import (
        Part as Part,
        Side as Side,
    )
    from sipp.repairing.polishing import (
        polish as polish,
    )
    from sipp.repairing.walk import (
        Repaired as Repaired,
        repair_network as repair_network,
        repair_part as repair_part,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
