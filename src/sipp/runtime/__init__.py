"""Runs a pruned network without its zeros, removes dead channels, and exports networks for other programs."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.runtime.copying import (
        plain_copy as plain_copy,
    )
    from sipp.runtime.examples import (
        call_of as call_of,
        numeric_difference as numeric_difference,
    )
    from sipp.runtime.shrinking.choosing import (
        ChannelOptions as ChannelOptions,
        choose_channels as choose_channels,
    )
    from sipp.runtime.shrinking.removing import (
        without_dead_channels as without_dead_channels,
    )
    from sipp.runtime.sparse_network import (
        sparse as sparse,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
