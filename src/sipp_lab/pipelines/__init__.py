"""Pipelines: the order in which networks are pruned and trained. One file each, and a row here."""

from sipp_lab.pipelines import at_init, gradual, iterative
from sipp_lab.pipelines.pipeline import Pipeline

PIPELINES: dict[str, Pipeline] = {
    "iterative": iterative.PIPELINE,
    "at-init": at_init.PIPELINE,
    "gradual": gradual.PIPELINE,
}

__all__ = ["PIPELINES", "Pipeline"]
