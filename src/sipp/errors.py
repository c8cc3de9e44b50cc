"""The errors a user can meet: each says what was wrong, where, and what to do about it, in fields of its own.

Two warnings have classes of their own, for code that tells of dead rows or of a holdout's uses itself. All warnings
name the line that called us.
"""

from __future__ import annotations

import sys
import warnings
from typing import TypeVar

AnError = TypeVar("AnError", bound="SippError")


class SippError(ValueError):
    """An error in fields, so that nobody has to take a message apart: it reads "where: what; fix".

    `option` names the argument that the message speaks of as "option=value": a command line spells it otherwise.
    """

    def __init__(self, what: str, *, where: object = "", fix: str = "", option: str = "") -> None:
        super().__init__(what)  # pickling calls the class with `what` alone, and puts the fields back afterwards
        self.what, self.where, self.fix, self.option = what, str(where), fix, option

    @property
    def fault(self) -> str:
        """What was wrong and where, without what to do."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        return f"{self.fault}; {self.fix}" if self.fix else self.fault

    def inside(self: AnError, place: str) -> AnError:
        """The same error, with a larger place before its own: "process 1 of 2: batch 3"."""
        where = f"{place}: {self.where}" if self.where else place
        return type(self)(self.what, where=where, fix=self.fix, option=self.option)


class ModelError(SippError):
    """A model holds something that cannot be handled: names the module or parameter and the way out."""


class DataError(SippError):
    """A batch or a data source cannot be used: names the batch and the reason."""


class OptionError(SippError):
    """An argument has a value outside its range, or two arguments exclude each other."""


class UnknownOption(OptionError, TypeError):
    """An argument that a function does not have, with what it is called here: a TypeError, as Python's own would be."""


class HoldoutReusedWarning(UserWarning):
    """A holdout was used for a second claim in one session, without a ledger that would count its uses."""


class DeadRowsWarning(UserWarning):
    """Rows or whole layers of a pruned network have no weight left; the records count them as `dead_rows`."""


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the caller's line, the first outside of sipp and of torch, whose decorators stand between."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("sipp", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
