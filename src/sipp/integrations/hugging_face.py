"""`HoldMasks` for the Trainer of transformers: keeps pruned weights at zero, and saves the masks in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from sipp.extras import needed_for
from sipp.files import write_atomic
from sipp.integrations.masks import masks_to_hold
from sipp.pruning import WithMasks, hold, masks_in, masks_of, release

with needed_for("holding masks in the HF Trainer"):
    from transformers import TrainerCallback

FILE = "sipp_masks.safetensors"


class HoldMasks(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """A callback that keeps the weights that are pruned in `pruned` at zero during training.

    `pruned` is what `sipp.prune` returned, or as for `sipp.hold`. Without it, the masks of the resumed checkpoint (in
    the Trainer's own folder) are used, or else the zeros of the network.

        Trainer(pruned.model, options, train_dataset=data, callbacks=[HoldMasks(pruned)]).train()
    """

    def __init__(self, pruned: WithMasks | None = None) -> None:
        self.masks = None if pruned is None else masks_in(pruned)

    # The Trainer gives model, optimizer and more by name; what it gives grows with its versions.
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer, place = kwargs["model"], kwargs.get("optimizer"), _place(args, state)
        stored = load_file(place) if place.is_file() else None
        self.masks = masks_to_hold(model, self.masks, stored)
        plain = getattr(optimizer, "optimizer", optimizer)  # the one that Accelerate wraps
        hold(model, self.masks, optimizer=plain)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        place = _place(args, state)
        if state.is_world_process_zero and place.parent.is_dir():
            write_atomic(place, save(masks_of(kwargs["model"])))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        release(kwargs["model"])


def _place(args: Any, state: Any) -> Path:
    """The file of the masks in the checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
