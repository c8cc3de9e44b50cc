"""Runs a recipe: a folder of trained networks and their records, resumable at any point."""
