"""Reading and writing files: atomic writes, tensors, the small file and the folder of a pruned network."""
