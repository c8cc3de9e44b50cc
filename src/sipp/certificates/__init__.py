"""Two networks and fresh points in, a statement of what the pruning costs out (T14, T16)."""
