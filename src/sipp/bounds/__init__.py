"""What is guaranteed for pruned rows, layers and the network (T11, T12, T17-T19)."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.bounds.same_architecture import (
        check_same_architecture as check_same_architecture,
    )
    from sipp.bounds.statements import (
        statements_of as statements_of,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
