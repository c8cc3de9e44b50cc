"""One score for every prunable weight: sensitivities (T1-T4) and the scores of other papers."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.scoring.methods import (
        MethodInfo as MethodInfo,
        checked_method as checked_method,
        method_of as method_of,
        scores_of as scores_of,
    )
    from sipp.scoring.running import (
        unreached_error as unreached_error,
    )
    from sipp.scoring.sensitivities import (
        chunk_bytes_on as chunk_bytes_on,
        measure_sensitivities as measure_sensitivities,
        ratios_of as ratios_of,
    )
    from sipp.scoring.task import (
        ScoringTask as ScoringTask,
        Sensitivities as Sensitivities,
        task_of as task_of,
    )
    from sipp.scoring.weight_scores import (
        shares_of as shares_of,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
