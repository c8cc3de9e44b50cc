"""Removes dead channels without changing the function: channels.py -> removing.py -> applying.py."""
