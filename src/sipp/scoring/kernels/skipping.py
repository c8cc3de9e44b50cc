"""The numbers of the test that leaves products out, on the CPU (`loops.py`) and on a GPU (`gpu.py`).

Skipping is exact: line k, patch p is left out of a band of rows where
    a_kp * max_r (u_rp * scale_r)  <=  min_r (best_kr * scale_r)  less the rounding of these products,
u the reciprocals 1/D; then a_kp * u_rp <= best_kr for every row r of the band. The left side is the activation times
the patch's reach, the right side the column's bar (`README.md`). How lines are scaled changes how much is skipped,
never what is found.
"""

# A test whose numbers are not normal proves nothing: it is made between these bounds only (and inputs are finite).
LEAST_BAR, LARGEST_BAR = 2.0**-100, 2.0**126
LEAST_REACH = 2.0**-60
LARGEST_SCALE = 2.0**100  # of a line: any number serves, if its products stay finite
# Rounding of the five operations of a test, 2^-24 each, with room: a patch that only ties is not left out by it.
BAR_SLACK = 1.0 - 2.0**-20
