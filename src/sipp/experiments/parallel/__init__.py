"""Several processes at one network, or several networks at once on Ray."""
