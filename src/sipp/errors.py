"""The errors a user can meet: each says what was wrong, where, and what to do about it."""


class ModelError(ValueError):
    """A model holds something that cannot be handled: names the module or parameter and the way out."""


class DataError(ValueError):
    """A batch or a data source cannot be used: names the batch and the reason."""


class OptionError(ValueError):
    """An argument has a value outside its range, or two arguments exclude each other."""
