"""Writes and reads files: the one atomic write, checksums, and what other rooms store with them.

`files.py` has the atomic write and JSON with a checksum, `tensors.py` safetensors files, and `outputs.py` says where a
command may write. `small_file.py` is the file of `sipp.save` (`coding.py`: its bits, `rounding.py`: its precision),
`pruned_folder.py` the folder of `sipp prune`, `state_files.py` a checkpoint of a run, and `block_by_block/` is for
networks that are larger than memory.
"""
