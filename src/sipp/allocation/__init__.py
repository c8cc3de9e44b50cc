"""Decides how many weights each row keeps, and which (T7, T10).

`largest` is optimal for SiPP-det (and for every baseline that ranks weights); `allocation_problem` and
`allocate_within` solve OptAlloc for SiPP-rand and SiPP-hybrid. Lists hold one tensor per layer; rows of different
layers may differ in fan-in.
"""
