"""Run folders and pruned models in, one self-contained page and figures for print out."""

from sipp.report.figures import figure_names, write_figures
from sipp.report.rendering import render
from sipp.report.results import read_results, read_whole_results

__all__ = ["figure_names", "read_results", "read_whole_results", "render", "write_figures"]
