"""Runs a pruned network on a CUDA GPU: sparse weight layouts, their kernels, the choice among them, CUDA graphs."""
