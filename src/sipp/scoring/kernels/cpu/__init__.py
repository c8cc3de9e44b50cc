"""The kernels on the CPU: float32, vector code and loops compiled by Numba."""
