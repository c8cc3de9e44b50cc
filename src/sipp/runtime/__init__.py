"""Runs a pruned network without its zeros, removes dead channels, and exports networks for other programs."""
