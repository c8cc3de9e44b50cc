"""The page: one self-contained HTML file. Named here is what a program needs for pages of its own."""

from typing import TYPE_CHECKING

from sipp.doors import door

if TYPE_CHECKING:
    from sipp.report.compare_networks import (
        networks_article as networks_article,  # several networks side by side
    )
    from sipp.report.contents import (
        Article as Article,  # what the page says about one thing: sections, tiles, tables
        Finding as Finding,
        Plot as Plot,
        Section as Section,
        SummaryTile as SummaryTile,
        Table as Table,
        TableCell as TableCell,
        flatten as flatten,  # nested values by dotted keys
        key_value_rows as key_value_rows,
    )
    from sipp.report.glossary import (
        WORDS as WORDS,  # what is explained on every page
    )
    from sipp.report.numbers import (
        TOLERANCE as TOLERANCE,  # the loss of accuracy that counts as none
        Unit as Unit,
        number as number,
        seconds as seconds,
        tone_of as tone_of,  # the colour of a change in accuracy
    )
    from sipp.report.one_network import (
        pruned_article as pruned_article,  # one network
    )
    from sipp.report.plots import (
        LAYER_DIGITS as LAYER_DIGITS,
        LAYER_VALUES as LAYER_VALUES,
        bar_view as bar_view,  # views are what a plot shows; plots have choices among views
        bars as bars,
        cards_plot as cards_plot,
        curve_view as curve_view,
        layer_view as layer_view,
        lines as lines,
        rounded as rounded,
        statement_cards as statement_cards,
    )
    from sipp.report.rendering import (
        render as render,
        write_page as write_page,
    )
    from sipp.report.results import (
        PrunedModel as PrunedModel,  # a pruned network and what was measured and certified
        is_pruned_result as is_pruned_result,
        read_pruned_result as read_pruned_result,
    )
    from sipp.report.series import (
        Curve as Curve,
        LayerRow as LayerRow,
        Point as Point,
        mean_of as mean_of,
        point_of as point_of,
        rows_of_layers as rows_of_layers,
    )
else:
    __getattr__, __dir__, __all__ = door(__name__, __file__)
