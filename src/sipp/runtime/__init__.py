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
        rounding_tolerance as rounding_tolerance,
        without_aliases as without_aliases,
    )
    from sipp.runtime.graph import (
        program_of as program_of,
    )
    from sipp.runtime.shrinking.applying import (
        apply as apply,
        parameters_and_buffers as parameters_and_buffers,
    )
    from sipp.runtime.shrinking.checking import (
        checked_plan as checked_plan,
        differs as differs,
        outputs_of as outputs_of,
    )
    from sipp.runtime.shrinking.choosing import (
        channel_options as channel_options,
        choose_channels as choose_channels,
    )
    from sipp.runtime.shrinking.configuration import (
        match_configuration as match_configuration,
    )
    from sipp.runtime.sparse_network import (
        Sparse as Sparse,
        sparse as sparse,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
