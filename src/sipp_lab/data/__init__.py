"""Data sets, and their batches: `sets.py` has the built-in ones, `feed.py` splits and orders them."""
