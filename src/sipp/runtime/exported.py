"""What `export` returns: the record of a file that other programs read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sipp.results import shown

Target = Literal["onnx", "hf"]


@dataclass(frozen=True)
@shown
class Exported:
    """What was written, and how much it differs from the network when read back. `print` it."""

    path: Path
    to: Target
    n_bytes: int
    off_by: float = 0.0  # largest relative difference of outputs on the example; weights are equal bit by bit
    n_inputs: int | None = None  # the only batch size that an ONNX file takes; None: any
    n_tokens: int | None = None  # the only sequence length; None: any, or no sequences
    has_tokens: bool = False  # it takes sequences of token ids
    beside: tuple[str, ...] = ()  # other files in a Hugging Face folder, such as the tokenizer
    n_sparse: int = 0  # tensors of an ONNX file that are stored without their zeros

    @property
    def sentence(self) -> str:
        """What was written, and what it takes."""
        zeros = f"{self.n_sparse} tensors without their zeros" if self.n_sparse else "zeros included"
        text = f"{self.path}: {self.to}, {self.n_bytes:,} bytes, {zeros}; read back, "
        if self.to == "hf":
            with_it = f"with {', '.join(self.beside)}" if self.beside else "without a tokenizer: none is known"
            return f"{text}every bit is the same; {with_it}"
        inputs = "any number of inputs"
        if self.n_inputs is not None:
            inputs = f"{self.n_inputs} input{'' if self.n_inputs == 1 else 's'} at a time only"
        if self.has_tokens:
            inputs += ", of any length" if self.n_tokens is None else f", of {self.n_tokens} tokens only"
        return text + f"outputs differ by {self.off_by:.0e} on the example; it takes {inputs}; other sizes are fixed"
