"""Files that are whole or not there: the one atomic write, the one reader and writer of tensors."""
