"""Checks data and models, and captures the patches that each weight meets."""
