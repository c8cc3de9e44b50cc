"""The page: one self-contained HTML file. Named here is what a program needs for pages of its own."""

from sipp.report.compare_networks import networks_article as networks_article  # several networks side by side
from sipp.report.contents import (
    Article as Article,  # what the page says about one thing: sections, tiles, tables
)
from sipp.report.contents import (
    Finding as Finding,
)
from sipp.report.contents import (
    Plot as Plot,
)
from sipp.report.contents import (
    Section as Section,
)
from sipp.report.contents import (
    SummaryTile as SummaryTile,
)
from sipp.report.contents import (
    Table as Table,
)
from sipp.report.contents import (
    TableCell as TableCell,
)
from sipp.report.contents import (
    flatten as flatten,  # nested values by dotted keys
)
from sipp.report.contents import (
    key_value_rows as key_value_rows,
)
from sipp.report.glossary import WORDS as WORDS  # what is explained on every page
from sipp.report.numbers import (
    TOLERANCE as TOLERANCE,  # the loss of accuracy that counts as none
)
from sipp.report.numbers import (
    Unit as Unit,
)
from sipp.report.numbers import (
    number as number,
)
from sipp.report.numbers import (
    seconds as seconds,
)
from sipp.report.numbers import (
    tone_of as tone_of,  # the colour of a change in accuracy
)
from sipp.report.plots import (
    LAYER_DIGITS as LAYER_DIGITS,
)
from sipp.report.plots import (
    LAYER_VALUES as LAYER_VALUES,
)
from sipp.report.plots import (
    bar_view as bar_view,  # views are what a plot shows; plots have choices among views
)
from sipp.report.plots import (
    bars as bars,
)
from sipp.report.plots import (
    cards_plot as cards_plot,
)
from sipp.report.plots import (
    curve_view as curve_view,
)
from sipp.report.plots import (
    layer_view as layer_view,
)
from sipp.report.plots import (
    lines as lines,
)
from sipp.report.plots import (
    rounded as rounded,
)
from sipp.report.plots import (
    statement_cards as statement_cards,
)
from sipp.report.pruned_article import pruned_article as pruned_article  # one network
from sipp.report.rendering import render as render
from sipp.report.rendering import write_page as write_page
from sipp.report.results import (
    PrunedModel as PrunedModel,  # a pruned network and what was measured and certified
)
from sipp.report.results import (
    is_pruned_result as is_pruned_result,
)
from sipp.report.results import (
    read_pruned_result as read_pruned_result,
)
from sipp.report.series import (
    Curve as Curve,
)
from sipp.report.series import (
    LayerRow as LayerRow,
)
from sipp.report.series import (
    Point as Point,
)
from sipp.report.series import (
    mean_of as mean_of,
)
from sipp.report.series import (
    point_of as point_of,
)
from sipp.report.series import (
    rows_of_layers as rows_of_layers,
)
