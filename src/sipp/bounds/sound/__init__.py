"""Two networks and points in, a bound on their distance that needs no assumption out (T13)."""
