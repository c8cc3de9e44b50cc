"""Runs a recipe: a folder of trained networks and their records, which can be stopped at any moment and resumed."""
