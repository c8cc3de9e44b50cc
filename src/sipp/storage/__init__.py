"""Reads and writes files: atomic writes, checksums (`files.py`), tensors as bytes (`tensors.py`), and what they hold.

`outputs.py` decides what may be replaced. `pruned_folder.py` is the folder of `sipp prune`, `state_files.py` is a
checkpoint of a run, `small_file/` the file of `sipp.save`, and `block_by_block/` networks that are larger than memory.
"""
