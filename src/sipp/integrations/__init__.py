"""Callbacks that keep pruned weights at zero in the trainers of other libraries, one file each."""
