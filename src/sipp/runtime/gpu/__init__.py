"""A pruned network on a CUDA GPU: layouts of weights without zeros, their kernels, the choice, the recorded call."""
