"""A smaller dense network: dependencies.py finds what belongs together, choosing.py chooses, removing.py removes."""
