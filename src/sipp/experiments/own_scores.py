"""Scores of a user's own in commands and runs: the file that registers them, and a digest of what each is made of.

Files of code come from the command line only, as in `own_code`. Needs no torch.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from sipp.errors import OptionError
from sipp.scoring.methods import MethodInfo, own_methods
from sipp.storage.files import sha256_of

DIGEST_LENGTH = 12
REGISTER = "register_method"


def load_scores(path: Path) -> None:
    """Runs a Python file, which registers at least one method; what stands beside it can be imported in it."""
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
    if all(before.get(one) is row for one, row in own_methods().items()):
        raise OptionError(
            "it registers no method", where=f"--code {path}", fix="call sipp.register_method(name, function) in it"
        )


def score_digest(method: MethodInfo) -> str:
    """A digest of a score's function, of all in its file that it refers to, and of how its weights are cut.

    Other scores in the file, comments and blank lines do not change it; neither does code that the file imports.
    """
    function: Any = method.score
    try:
        source = Path(inspect.getsourcefile(function) or "").read_text(encoding="utf-8")
    except (OSError, TypeError, UnicodeDecodeError) as error:
        raise OptionError(
            f"the source of method {method.name!r} cannot be read", fix="define its function in a file"
        ) from error
    parts = _referred(ast.parse(source), getattr(function, "__qualname__", ""))
    text = "\n".join(ast.unparse(part) for part in parts) if parts else source  # a lambda, a method: all of its file
    return sha256_of(text.encode(), repr((sorted(method.needs), method.cut)).encode())[:DIGEST_LENGTH]


def _referred(module: ast.Module, name: str) -> list[ast.stmt]:
    """The statements of a file that make this name, and those that make or change what they refer to, in order."""
    if not any(isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == name for one in module.body):
        return []
    touched = [_touches(statement) for statement in module.body]
    todo, known, found = [name], {name}, set[int]()
    while todo:
        one = todo.pop()
        for i, statement in enumerate(module.body):
            if one in touched[i] and i not in found:
                found.add(i)
                new = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} - known
                known |= new
                todo += new
    return [module.body[i] for i in sorted(found)]


def _touches(statement: ast.stmt) -> set[str]:
    """The names of a file that a statement makes or may change; a call that registers changes none."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(one.asname or one.name).partition(".")[0] for one in statement.names}
    called = statement.value.func if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
    if REGISTER in (getattr(called, "id", None), getattr(called, "attr", None)):
        return set()
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
