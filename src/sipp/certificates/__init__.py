"""Measures on fresh points what the pruning costs (T14, T16)."""
