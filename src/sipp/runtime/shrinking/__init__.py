"""A network in, the same function with fewer channels out: channels.py -> removing.py -> applying.py."""
