"""Measures what pruning costs on new inputs, and certifies it (T14-T16)."""
