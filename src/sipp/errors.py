"""Errors and warnings: each error says what was wrong, where, and what to do, in separate fields.

Two warnings have their own class, so that code that reports dead rows or reused holdouts itself can silence them. All
warnings point to the caller's line.
"""

from __future__ import annotations

import sys
import warnings
from typing import TypeVar

AnError = TypeVar("AnError", bound="SippError")


class SippError(ValueError):
    """The base of all errors; as text it reads "where: what; fix".

    `option` is the argument that the text mentions as "option=value", which the command line writes as "--option".
    """

    def __init__(self, what: str, *, where: object = "", fix: str = "", option: str = "") -> None:
        super().__init__(what)  # unpickling calls the class with `what` alone, then sets the fields
        self.what, self.where, self.fix, self.option = what, str(where), fix, option

    @property
    def fault(self) -> str:
        """What was wrong and where, without what to do."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        return f"{self.fault}; {self.fix}" if self.fix else self.fault

    def inside(self: AnError, place: str) -> AnError:
        """The same error with an outer place before its own: "process 1 of 2: batch 3"."""
        where = f"{place}: {self.where}" if self.where else place
        return type(self)(self.what, where=where, fix=self.fix, option=self.option)


class ModelError(SippError):
    """The model cannot be pruned, measured or stored as it is; `where` names the module or parameter."""


class DataError(SippError):
    """A batch or a data source cannot be used; `where` names it."""


class OptionError(SippError):
    """An argument is out of range, or two arguments cannot be combined."""


class UnknownOption(OptionError, TypeError):
    """A function has no such argument; `fix` names the right one. It is a TypeError, as in plain Python."""


class DeadRowsWarning(UserWarning):
    """Rows or whole layers of a pruned network have no weight left; the records count them as `dead_rows`."""


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the caller's line: the first outside of sipp and torch, whose decorators are in between."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("sipp", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
