"""A pruned network as a callable that skips its zeros, and export for other programs."""
