"""Networks larger than memory: weights in Hugging Face's files, read, pruned and written one block at a time."""
