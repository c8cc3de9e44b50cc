"""Optional packages, and an error that names the extra to install if one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from sipp.errors import OptionError

# name in an import -> (name for pip, extra of this package that brings it)
EXTRAS = {
    "jinja2": ("jinja2", "report"),
    "markupsafe": ("jinja2", "report"),  # comes with it
    "yaml": ("pyyaml", "train"),
    "PIL": ("pillow", "train"),
    "sklearn": ("scikit-learn", "train"),
    "accelerate": ("accelerate", "hf"),
    "ray": ("ray", "ray"),
    "transformers": ("transformers", "hf"),
    "huggingface_hub": ("transformers", "hf"),  # comes with it
    "pytorch_lightning": ("pytorch-lightning", "lightning"),
    "onnx": ("onnx", "onnx"),
    "onnxscript": ("onnxscript", "onnx"),
    "onnxruntime": ("onnxruntime", "onnx"),
}


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """A context for imports of optional packages; if one is missing, an OptionError names its extra.

    A package that is installed but fails to import raises its own error.

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
        raise OptionError(f"{purpose} needs {name}", fix=f"run pip install '.[{extra}]' in a clone of sipp") from error
