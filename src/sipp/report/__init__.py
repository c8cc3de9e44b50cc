"""Run folders and pruned models in, one self-contained page and figures for print out."""

from sipp.report.figures import figure_names, write_figures
from sipp.report.page import render
from sipp.report.read import files_read, read_sources, read_whole_sources

__all__ = ["figure_names", "files_read", "read_sources", "read_whole_sources", "render", "write_figures"]
