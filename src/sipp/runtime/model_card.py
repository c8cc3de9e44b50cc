"""The model card of an exported folder: its README.md, written from the record of the pruning.

Hubs read the lines between the two `---`. The certificate is about the weights before `values` rounded them.
"""

from __future__ import annotations

from pathlib import Path

from sipp import __version__
from sipp.results import AnyCertificate, Pruned, cost_of, headline, up_to_date

CARD = "README.md"
PAPER = "[SiPP](https://arxiv.org/abs/1910.05422)"


def model_card(pruned: Pruned, certificate: AnyCertificate | None, *, name: str, origin: str, values: str) -> str:
    """The text of the card; `origin` is what the dense model was loaded from, or empty."""
    now = up_to_date(pruned)
    is_on_hub = origin.count("/") == 1 and not Path(origin).exists()  # not a folder of this machine
    head = ["---", "library_name: transformers", *([f"base_model: {origin}"] if is_on_hub else [])]
    of_what = f" It is a pruned copy of `{origin}`." if is_on_hub else ""
    lines = [f"{headline(now)}.{of_what} The other weights are zero."]
    if now.repair is not None:
        lines.append(f"The kept weights were repaired without labels or training. {now.repair.sentence}")
    if values != "same":
        lines.append(f"Weights were then rounded to {values}; what follows is about the network before.")
    lines.append(f"**Error.** {cost_of(now) if certificate is None else certificate.sentence}")
    lines.append(
        "The zeros are stored like other numbers: the model loads like the dense one, takes as much memory and runs "
        f"as fast. Made with sipp {__version__} ({PAPER})."
    )
    return "\n".join([*head, "tags:", "- pruned", "- sipp", "---", "", f"# {name}", "", "\n\n".join(lines), ""])
