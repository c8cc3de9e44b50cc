"""The new rows in, what is promised about rows, layers and network out (T11, T12, T17-T19)."""
