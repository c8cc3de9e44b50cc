"""A recipe in, a folder of finished networks and their records out, resumable at any point."""
