"""`HoldMasks` for Lightning: keeps pruned weights at zero, and saves the masks in checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sipp.extras import needed_for
from sipp.integrations.masks import masks_to_hold
from sipp.pruning import WithMasks, hold, masks_in, release

with needed_for("holding masks in Lightning"):
    if "lightning.pytorch" in sys.modules:  # the same library under its other name, whose classes are others
        from lightning.pytorch import Callback
    else:
        from pytorch_lightning import Callback


class HoldMasks(Callback):  # type: ignore[misc,unused-ignore]
    """A callback that keeps the weights that are pruned in `pruned` at zero during training.

    `pruned` is what `sipp.prune` returned, or as for `sipp.hold`. Without it, the masks of the resumed checkpoint are
    used, or else the zeros of the network. `part` names the submodule that was pruned ("net" for `module.net`);
    empty means the whole LightningModule.

        Trainer(callbacks=[HoldMasks(pruned, part="net")]).fit(module, loader)
    """

    def __init__(self, pruned: WithMasks | None = None, *, part: str = "") -> None:
        self.masks = None if pruned is None else masks_in(pruned)
        self.part = part
        self._stored: Mapping[str, Tensor] | None = None

    @property
    def state_key(self) -> str:
        """The key of the masks in a checkpoint; each part has its own."""
        return f"sipp.HoldMasks({self.part!r})"

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        net = pl_module.get_submodule(self.part)
        self.masks, self._stored = masks_to_hold(net, self.masks, self._stored), None
        hold(net, self.masks, optimizer=trainer.optimizers)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        release(pl_module.get_submodule(self.part))

    def state_dict(self) -> dict[str, Any]:
        return {} if self.masks is None else {"masks": self.masks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stored = state_dict.get("masks")
