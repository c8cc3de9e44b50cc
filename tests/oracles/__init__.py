"""Slow, obvious float64 versions of the statements, importing nothing from the package under test."""
