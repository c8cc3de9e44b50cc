"""Brings a pruned network closer to the dense one: search for masks and weights, refit of kept weights, polish."""
