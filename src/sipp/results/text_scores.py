"""The result of `perplexity`: scores of a language model on a text, and its distance from the dense one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sipp.results.sheet import Sheet, shown


@dataclass(frozen=True)
@shown
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
    data_hash: str = ""  # of the set of windows
    dense_hash: str = ""  # empty: none was given
    pruned_hash: str = ""
    inputs: str = ""  # what the windows are, in words

    ALSO_IN_JSON = ("perplexity", "dense_perplexity")

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def dense_perplexity(self) -> float | None:
        return None if self.dense_loss is None else _exp(self.dense_loss)

    @property
    def sheet(self) -> Sheet:
        beside = "" if self.dense_perplexity is None else f", dense {self.dense_perplexity:.2f}"
        windows = f"{self.n_windows:,} windows of {self.window:,} tokens that do not overlap"
        facts = [("over", f"{windows}, {self.n_tokens:,} tokens predicted")]
        if self.kl is not None and self.same_token is not None:
            facts.append(("KL", f"{self.kl:.4g} nats per token from the dense network"))
            facts.append(("same next token", f"{self.same_token:.2%} of positions"))
        return Sheet(f"perplexity {self.perplexity:.2f}{beside}", tuple(facts))


def _exp(loss: float) -> float:
    """exp(loss), or infinity if that overflows or the loss is not finite."""
    return math.exp(loss) if loss < math.log(2.0) * 1023 else math.inf
