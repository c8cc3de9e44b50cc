"""Scores and a budget in, a sparse copy of the model with its masks out."""
