"""Masks that hold in the trainers of other libraries: one file each, which imports its library when it is imported."""
