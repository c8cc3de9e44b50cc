"""Writes and reads files: the small file, the folder of a pruned network, and networks that are larger than memory.

`small_file.py` is the file of `sipp.save` (`coding.py`: its bits, `rounding.py`: its precision), `pruned_folder.py` the
folder of `sipp prune`, and `block_by_block/` is for networks that are larger than memory. Every file is written by
`write_atomic` of `files.py`.
"""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.storage.block_by_block.block_folder import (
        BlockFolder as BlockFolder,
    )
    from sipp.storage.block_by_block.network_in_files import (
        NetworkInFiles as NetworkInFiles,
    )
    from sipp.storage.block_by_block.sharded_weights import (
        companion_files as companion_files,
    )
    from sipp.storage.pruned_folder import (
        read_pruned as read_pruned,
        write_pruned as write_pruned,
    )
    from sipp.storage.small_file import (
        decode as decode,
        encode as encode,
        file_content as file_content,
        named_tensors as named_tensors,
        read_contents as read_contents,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
