"""The public names of a package, each imported when it is first used.

A room's `__init__.py` lists them under `if TYPE_CHECKING:`, as imports with a word on each. Readers and type checkers
see this list, and `door` reads it: there is no second one, and no name costs the import of its neighbours.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def door(room: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of the package whose `__init__.py` is this file."""
    (listed,) = (node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If))
    imports = [node for node in listed.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: str(node.module) for node in imports if node.module != room for alias in node.names}

    def named(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[room], name, value)  # the next time it is simply there
        return value

    return named, lambda: sorted({*vars(sys.modules[room]), *module_of}), sorted(module_of)
