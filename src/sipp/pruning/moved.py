"""How far a cut moves the output of a network, on a few points."""

from __future__ import annotations

from sipp.inputs.batches import points_at
from sipp.inputs.distance import output_error
from sipp.inputs.scoring_task import ScoringTask
from sipp.pruning.cutting import Cut
from sipp.pruning.ranking import N_SAMPLE
from sipp.records.pruned import OutputChange
from sipp.records.ranking import Ranking


def output_moved(ranking: Ranking, cut: Cut, task: ScoringTask) -> OutputChange | None:
    """What the cut does to the output on the points that chose a blend, or on at most 32 others; None without any.

    One forward pass of each network; a blend has measured it on the points kept aside.
    """
    if cut.choice is not None:
        return OutputChange(cut.choice.taken.error, cut.choice.n_points, aside=cut.choice.is_aside)
    sample = ranking.sample
    if sample is None and task.data is not None and task.data.can_be_read_again:
        sample = points_at(next(task.data.batches(N_SAMPLE)), slice(N_SAMPLE))
    if sample is None:
        return None
    error = output_error(ranking.model, cut.model, [sample])
    return None if error is None else OutputChange(error, sample.n_points, aside=False)
