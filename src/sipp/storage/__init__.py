"""Writes and reads files: the one atomic write, checksums, and what other rooms store with them.

`files.py` has the atomic write and JSON with a checksum, `tensors.py` safetensors files, and `outputs.py` says where a
command may write. `small_file.py` is the file of `sipp.save` (`coding.py`: its bits, `rounding.py`: its precision),
`pruned_folder.py` the folder of `sipp prune`, `state_files.py` a checkpoint of a run, and `block_by_block/` is for
networks that are larger than memory.
"""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.storage.block_by_block.block_folder import (
        BlockFolder as BlockFolder,
        file_of_block as file_of_block,
    )
    from sipp.storage.block_by_block.network_in_files import (
        NetworkInFiles as NetworkInFiles,
    )
    from sipp.storage.block_by_block.sharded_weights import (
        ShardedWeights as ShardedWeights,
        companion_files as companion_files,
        sharded_weights as sharded_weights,
        write_shard as write_shard,
    )
    from sipp.storage.pruned_folder import (
        is_pruned_folder as is_pruned_folder,
        read_pruned as read_pruned,
        write_pruned as write_pruned,
    )
    from sipp.storage.small_file import (
        cannot_take as cannot_take,
        decode as decode,
        encode as encode,
        file_content as file_content,
        named_tensors as named_tensors,
        read_contents as read_contents,
    )
    from sipp.storage.tensors import (
        read_tensors as read_tensors,
        tensors_to_bytes as tensors_to_bytes,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
