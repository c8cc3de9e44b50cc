"""Repair without training or labels: refit of the kept weights layer by layer, then a polish of the whole network."""
