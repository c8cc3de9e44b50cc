"""Loads a user's own scores from the file that registers them, and computes a digest of each.

Only the command line may name such files, as in `own_code`. Imports no torch.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from sipp.errors import OptionError
from sipp.scoring.methods import MethodInfo, own_methods
from sipp.storage.files import sha256_of

DIGEST_LENGTH = 12


def load_scores(path: Path) -> None:
    """Executes a Python file that registers at least one method; it can import modules beside it."""
    if path.suffix != ".py" or not path.is_file():
        raise OptionError("there is no Python file of this name", where=f"--code {path}", fix="give a .py file")
    before = own_methods()
    module = ModuleType(f"sipp_code_{path.stem}")
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    try:
        exec(compile(path.read_bytes(), module.__file__, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and type(error) is not SystemExit:  # a signal on its way out
            raise
        raise OptionError(
            f"it cannot be run ({type(error).__name__}: {error})", where=f"--code {path}", fix="correct the file"
        ) from error
    if all(before.get(name) is row for name, row in own_methods().items()):
        raise OptionError(
            "it registers no method", where=f"--code {path}", fix="call sipp.register_method(name, function) in it"
        )


def score_digest(method: MethodInfo) -> str:
    """A digest of the file that defines a score, and of how its weights are cut.

    Any change to the file changes it, so a run is never resumed with a modified score.
    """
    function: Any = method.score
    try:
        source = Path(inspect.getsourcefile(function) or "").read_bytes()
    except (OSError, TypeError) as error:
        raise OptionError(
            f"the source of method {method.name!r} cannot be read", fix="define its function in a file"
        ) from error
    return sha256_of(source, repr((sorted(method.needs), method.cut)).encode())[:DIGEST_LENGTH]
