"""The public functions, one file each."""
