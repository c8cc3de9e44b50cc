"""The page: one self-contained HTML file. Named here is what a program needs for pages of its own."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.report import (
        numbers as numbers,  # numbers with units, as texts; which loss of accuracy counts
        plots as plots,  # curves, bars and cards
    )
    from sipp.report.compare_networks import (
        network_articles as network_articles,  # about pruned networks: several side by side, then each
    )
    from sipp.report.contents import (
        Article as Article,  # what the page says about one thing: sections, tiles, tables
        Finding as Finding,
        PageCell as PageCell,
        PageTable as PageTable,
        Section as Section,
        flatten as flatten,  # nested values by dotted keys
    )
    from sipp.report.networks import (
        PrunedModel as PrunedModel,  # a pruned network and what was measured and certified
        read_pruned_result as read_pruned_result,
    )
    from sipp.report.rendering import (
        render as render,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
