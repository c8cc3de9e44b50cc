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
        error_on_test_points as error_on_test_points,
        merged_batches as merged_batches,
        split_batches as split_batches,
        split_data as split_data,
    )
    from sipp.repairing.layer_fit import (
        LayerTask as LayerTask,
    )
    from sipp.repairing.network import (
        apply_repairs as apply_repairs,
        is_dense_under_masks as is_dense_under_masks,
        polished as polished,
        repair_network as repair_network,
        repaired_cut as repaired_cut,
    )
    from sipp.repairing.parts import (
        Part as Part,
        Side as Side,
        parts_of as parts_of,
        run_part as run_part,
    )
    from sipp.repairing.polishing import (
        LEARNING_RATE as LEARNING_RATE,
        MOST_STEPS as MOST_STEPS,
        polish as polish,
    )
    from sipp.repairing.repair_task import (
        LARGE_ERROR_FEEDBACK as LARGE_ERROR_FEEDBACK,
        RIDGE as RIDGE,
        RepairTask as RepairTask,
    )
    from sipp.repairing.walk import (
        NetworkFit as NetworkFit,
        both_of as both_of,
        fit_parts as fit_parts,
        masked_layers as masked_layers,
        side_of as side_of,
        task_for as task_for,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
