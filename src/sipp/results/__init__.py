"""Frozen records of results and options, how they print, and helpers that every folder uses."""
