"""The small file of `sipp.save`: positions and values of the kept weights in few bytes, and an index of the rest."""
