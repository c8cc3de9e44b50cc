"""Runs a pruned network without its zeros, removes dead channels, and exports networks for other programs."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.runtime.copying import (
        plain_copy as plain_copy,
    )
    from sipp.runtime.counting import (
        multiply_adds as multiply_adds,
    )
    from sipp.runtime.examples import (
        Call as Call,
        call_of as call_of,
        guess_call as guess_call,
        output_difference as output_difference,
        without_aliases as without_aliases,
    )
    from sipp.runtime.shrinking.choosing import (
        ChannelOptions as ChannelOptions,
        choose_channels as choose_channels,
    )
    from sipp.runtime.shrinking.configuration import (
        match_configuration as match_configuration,
    )
    from sipp.runtime.shrinking.removing import (
        without_dead_channels as without_dead_channels,
    )
    from sipp.runtime.shrinking.running import (
        parameters_and_buffers as parameters_and_buffers,
    )
    from sipp.runtime.sparse_network import (
        Sparse as Sparse,
        sparse as sparse,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
