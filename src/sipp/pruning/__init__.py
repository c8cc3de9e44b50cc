"""Ranks weights, cuts a copy of the model to a budget, and holds masks during training."""
