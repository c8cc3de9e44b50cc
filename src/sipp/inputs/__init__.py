"""Checks data and models, and captures the patches that each weight meets."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.inputs import (
        labels as labels,  # class numbers in whatever form people write them
        outputs as outputs,  # how far networks are apart, and what depends on other inputs
    )
    from sipp.inputs.capture import (
        ONE_AT_A_TIME as ONE_AT_A_TIME,
        OnUse as OnUse,
        check_can_be_written as check_can_be_written,
        check_has_values as check_has_values,
        copy_of as copy_of,
        depends_on_batch as depends_on_batch,
        restoring as restoring,
        run_batch as run_batch,
        scoring_mode as scoring_mode,
        turn_off_caches as turn_off_caches,
    )
    from sipp.inputs.data import (
        AnyData as AnyData,
        Batch as Batch,
        Data as Data,
        data_of as data_of,
        hash_of_points as hash_of_points,
        merged_batches as merged_batches,
        split_off as split_off,
    )
    from sipp.inputs.layers.registry import (
        PrunableLayer as PrunableLayer,
        find_prunable_layers as find_prunable_layers,
        lora_layers as lora_layers,
        unscored_layers as unscored_layers,
        unwrap as unwrap,
    )
    from sipp.inputs.patches import (
        ValueRange as ValueRange,
        Weight as Weight,
        WeightUse as WeightUse,
        patches_of as patches_of,
        split_windows as split_windows,
        value_range as value_range,
        with_padding_zeroed as with_padding_zeroed,
    )
    from sipp.inputs.recording import (
        THE_MODEL as THE_MODEL,
        VALUELESS as VALUELESS,
        Recorder as Recorder,
        Watch as Watch,
        name_of_operation as name_of_operation,
    )
    from sipp.inputs.structure import (
        Blocks as Blocks,
        Place as Place,
        Residual as Residual,
        is_residual as is_residual,
    )
    from sipp.inputs.trace import (
        ModelMap as ModelMap,
        map_for as map_for,
        read_uses as read_uses,
        trace_layers as trace_layers,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
