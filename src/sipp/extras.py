"""The packages that only a part of `sipp` needs, and the error that names the extra where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from sipp.errors import OptionError

# name in an import -> (name for pip, extra of this package that brings it)
EXTRAS = {
    "jinja2": ("jinja2", "report"),
    "markupsafe": ("jinja2", "report"),  # comes with it
    "matplotlib": ("matplotlib", "report"),
    "yaml": ("pyyaml", "train"),
    "PIL": ("pillow", "train"),
    "sklearn": ("scikit-learn", "train"),
    "accelerate": ("accelerate", "train"),
    "ray": ("ray", "ray"),
    "transformers": ("transformers", "hf"),
    "pytorch_lightning": ("pytorch-lightning", "lightning"),
    "gguf": ("gguf", "hf"),
    "onnx": ("onnx", "onnx"),
    "onnxscript": ("onnxscript", "onnx"),
    "onnxruntime": ("onnxruntime", "onnx"),
}


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """A context for imports of optional packages: a missing one is an OptionError that names its extra.

    An installed package that fails to import for another reason keeps its own error.

    >>> with needed_for("drawing the page"):
    ...     import jinja2
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        name, extra = EXTRAS[package]
        raise OptionError(f"{purpose} needs {name}", fix=f"run pip install 'sipp[{extra}]'") from error
