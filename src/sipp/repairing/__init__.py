"""Mask and weights found together, refit of kept weights, polish: a pruned network brought nearer to the dense one."""
