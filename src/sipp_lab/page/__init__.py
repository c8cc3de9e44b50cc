"""The page about runs, also together with pruned networks: tables, curves, and what to use."""

from sipp_lab.page.results import read_results, render, write_results

__all__ = ["read_results", "render", "write_results"]
