"""Experiments: networks, data, recipes, training, pipelines, and runs that can be stopped and resumed."""
