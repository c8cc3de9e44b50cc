"""Reports on runs and pruned networks: one self-contained HTML page, and figures for print."""

from sipp.report.figures import figure_names, write_figures
from sipp.report.rendering import render, write_page
from sipp.report.results import read_intact_results, read_results

__all__ = ["figure_names", "read_intact_results", "read_results", "render", "write_figures", "write_page"]
