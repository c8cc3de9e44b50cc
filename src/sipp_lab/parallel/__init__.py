"""One network in several processes, or several networks at once on Ray."""
