"""Loads a user's own code: a network and data by name, and scores from a file.

Only the command line may name code (`load_recipe` refuses it in a recipe's file), so that no file from elsewhere can
decide what is executed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import sipp
from sipp.errors import OptionError
from sipp.files import sha256_of
from sipp_lab.data.images import ImageSet

DIGEST_LENGTH = 12
CALLABLE = "give package.module:callable, which is called without arguments"
SETS = "(training images, training labels, test images, test labels)"


@contextmanager
def user_code(spec: str, what: str, *, fix: str = CALLABLE) -> Iterator[None]:
    """Turns what the user's code raises in the block, or its exit, into an OptionError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and type(error) is not SystemExit:  # a signal on its way out
            raise
        module = spec.partition(":")[0]
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise OptionError(
                f"there is no module {module!r} in {Path.cwd()}, nor among the installed packages",
                fix=f"start in the folder of {module.replace('.', '/')}.py, or give another package.module:callable",
            ) from error
        raise OptionError(f"{spec!r} failed to return {what} ({type(error).__name__}: {error})", fix=fix) from error


def import_named(spec: str) -> Any:
    """Imports `package.module:name`, looking in the current folder first, as `python -m` does."""
    module_name, _, attribute = spec.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    value: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def own_network(spec: str) -> nn.Module:
    """Calls the user's function and returns its network in train mode; a network itself would be shared by seeds."""
    with user_code(spec, "a network"):
        model = import_named(spec)()
    if not isinstance(model, nn.Module):
        raise OptionError(f"{spec!r} returned a {type(model).__name__}, not an nn.Module", fix="return a new network")
    return model.train()


def own_images(spec: str) -> ImageSet:
    """Calls the user's function and returns its data: float32 images N x C x H x W and labels 0, 1, ..."""
    with user_code(spec, "data"):
        tensors = import_named(spec)()
    parts = tensors if isinstance(tensors, tuple) else ()
    if len(parts) != 4 or not all(isinstance(part, torch.Tensor) for part in parts):
        raise OptionError(f"{spec!r} did not return four tensors", fix=f"return {SETS}")
    images, labels = torch.cat([parts[0], parts[2]]), torch.cat([parts[1], parts[3]])
    if images.dtype != torch.float32 or not bool(images.isfinite().all()):
        raise OptionError(f"the images of {spec!r} are not all finite float32", fix="return finite float32 images")
    if labels.dtype != torch.int64 or not len(labels) or int(labels.min()) < 0:
        raise OptionError(
            f"the labels of {spec!r} are not int64 class numbers from 0", fix="return int64 labels 0, 1, ..."
        )
    return ImageSet("own", images, labels, len(parts[0]), int(labels.max()) + 1)


def load_scores(path: Path) -> None:
    """Executes a Python file that registers at least one method; it can import modules beside it."""
    option = f"--code {path}"
    if path.suffix != ".py" or not path.is_file():
        raise OptionError("there is no Python file of this name", where=option, fix="give a .py file")
    before, file = sipp.methods(), path.resolve()
    module = ModuleType(f"sipp_code_{path.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    with user_code(option, "scores", fix="run it alone to see where it fails"):
        exec(compile(path.read_bytes(), str(file), "exec"), vars(module))
    if all(before.get(name) is row for name, row in sipp.methods().items()):
        raise OptionError("it registers no method", where=option, fix="call sipp.register_method(name, function) in it")


def digest_of(name: str, code: Any = None) -> str:
    """The name, and a digest of the file that defines the code (by default what is named so).

    A run is not resumed with other code.
    """
    with user_code(name, "source", fix="define it in a file"):
        content = Path(inspect.getsourcefile(import_named(name) if code is None else code) or "").read_bytes()
    return f"{name} source {sha256_of(content)[:DIGEST_LENGTH]}"
