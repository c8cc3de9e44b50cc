"""The page about runs, also together with pruned networks: tables, curves, and what to use."""

from sipp_lab.page.comparison import StudySummary
from sipp_lab.page.results import read_intact_results, read_results, render, write_results

__all__ = ["StudySummary", "read_intact_results", "read_results", "render", "write_results"]
