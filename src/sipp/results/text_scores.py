"""The result of `perplexity`: scores of a language model on a text, and its distance from the dense one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from sipp.results.display import labelled_line


@dataclass(frozen=True)
class TextScores:
    """Perplexity on a text, and the distance of a pruned network from the dense one. `print` it.

    Measured on this text; for a claim about other texts, use `certify`.
    """

    n_windows: int
    window: int  # tokens of the longest; windows do not overlap, so the stride is as long
    n_tokens: int  # that were predicted: all but the first of each window
    loss: float  # mean -log p(token), in nats
    dense_loss: float | None  # of the dense network, as the two below; None: none was given
    kl: float | None  # mean KL(dense || this) of the next token's distribution, in nats a token
    same_token: float | None  # the share of positions at which both choose the same next token

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def dense_perplexity(self) -> float | None:
        return None if self.dense_loss is None else _exp(self.dense_loss)

    def __str__(self) -> str:
        beside = "" if self.dense_perplexity is None else f", dense {self.dense_perplexity:.2f}"
        lines = [
            labelled_line("perplexity", f"{self.perplexity:.2f}{beside}"),
            labelled_line(
                "",
                f"over {self.n_windows:,} windows of {self.window:,} tokens that do not overlap, "
                f"{self.n_tokens:,} tokens predicted",
            ),
        ]
        if self.kl is not None and self.same_token is not None:
            lines.append(labelled_line("KL", f"{self.kl:.4g} nats per token from the dense network"))
            lines.append(labelled_line("same next token", f"{self.same_token:.2%} of positions"))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _exp(loss: float) -> float:
    """exp(loss), or infinity if that overflows or the loss is not finite."""
    return math.exp(loss) if loss < math.log(2.0) * 1023 else math.inf
