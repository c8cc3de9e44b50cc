"""A bound on the distance of two networks at given points that needs no assumption (T13)."""
