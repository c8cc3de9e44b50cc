"""Calls a user's own score with a copy of the model, and checks what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sipp.errors import ModelError, OptionError, SippError
from sipp.inputs import copy_of
from sipp.results import numerics
from sipp.scoring.gradient_scores import ordinals, with_gradients
from sipp.scoring.methods import MethodInfo
from sipp.scoring.task import ScoringTask

RETURN = "return {parameter name: tensor of its shape} for all of task.parameters()"


def own_scores(task: ScoringTask, method: MethodInfo) -> dict[str, Tensor]:
    """The scores of a user's function, none of them negative: where some are, all are replaced by their order.

    The function gets a copy of the model, in eval mode and with gradients, so it may do with it what it likes.
    """
    assert callable(method.score)
    parameters, own = task.parameters(), replace(task, model=copy_of(task.model))
    with with_gradients(own, list(own.parameters().values())):
        try:
            found = method.score(own)
        except SippError:
            raise
        except Exception as error:  # their code may raise anything; its traceback is chained
            raise OptionError(
                f"method={method.name!r}: your score raised {type(error).__name__}: {error}", option="method"
            ) from error
    scores = {name: _checked(found, name, parameter, method) for name, parameter in parameters.items()}
    if any(bool((score < 0).any()) for score in scores.values()):
        return dict(zip(scores, ordinals(list(scores.values()))))
    return scores


def _checked(found: Any, name: str, parameter: Tensor, method: MethodInfo) -> Tensor:
    """The scores of one parameter, in double precision on its device."""
    score = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(score, Tensor) or score.shape != parameter.shape or score.is_complex():
        what = f"{tuple(score.shape)}" if isinstance(score, Tensor) else f"a {type(score).__name__}"
        if not isinstance(found, Mapping):
            what = f"a {type(found).__name__} in place of a dictionary"
        raise OptionError(
            f"method={method.name!r}: your score returned {what} for {name}, which is {tuple(parameter.shape)}",
            fix=RETURN,
            option="method",
        )
    score = score.detach().to(dtype=numerics.BOUND_DTYPE, device=parameter.device)
    if not bool(torch.isfinite(score).all()):
        raise ModelError(f"the score {method.name!r} returned numbers that are not finite", where=name)
    return score
