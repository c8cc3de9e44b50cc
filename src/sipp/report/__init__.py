"""Run folders and pruned models in, one self-contained page and figures for print out."""

from sipp.report.figures import figure_names, write_figures
from sipp.report.read import files_read, read_results, read_whole_results
from sipp.report.rendering import render

__all__ = ["figure_names", "files_read", "read_results", "read_whole_results", "render", "write_figures"]
