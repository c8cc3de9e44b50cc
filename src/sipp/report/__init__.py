"""Run folders and pruned models in, one self-contained page and figures for print out; needs no torch."""

from sipp.report.figures import write_figures
from sipp.report.page import render
from sipp.report.read import read_sources, read_whole_sources

__all__ = ["read_sources", "read_whole_sources", "render", "write_figures"]
