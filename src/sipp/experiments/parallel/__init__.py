"""Several processes for one network, or several networks at once on Ray."""
