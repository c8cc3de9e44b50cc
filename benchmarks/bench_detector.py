"""Prunes, repairs, fine-tunes and shrinks a small YOLO, and measures its mAP by the validation of ultralytics.

    python benchmarks/bench_detector.py --folder detector

Needs `pip install ultralytics` (AGPL) in an environment of its own: sipp does not depend on it. The images are drawn
here: 1 to 4 circles, squares and triangles of any colour on a blurred background, 96 x 96. YOLO11n is trained on 2,000
of them for 20 epochs and measured on 500 others. Later runs find what an earlier one has trained in the folder;
`--only` names the parts to run. Writes benchmarks/figures/detector.json.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import table, write_figures
from PIL import Image, ImageDraw
from torch import Tensor, nn
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer

import sipp
from sipp.errors import DeadRowsWarning

SIDE, N_TRAIN, N_VAL, N_CALIBRATION = 96, 2000, 500, 400
EPOCHS, TUNING_EPOCHS = 20, 2
KEEPS, TUNED_KEEPS, MULTIPLY_ADDS = (0.5, 0.3), (0.2, 0.1), 0.7
FIXED = "*dfl*"  # 16 constants that turn a distribution into a length
WORK = (
    f"YOLO11n on {SIDE} x {SIDE} images of drawn shapes, trained for {EPOCHS} epochs on {N_TRAIN}; mAP 50 to 95 on "
    f"{N_VAL} others; {N_CALIBRATION} training images to prune, repair and shrink; fine-tuning: {TUNING_EPOCHS} epochs"
)


def draw(folder: Path, n_images: int, seed: int) -> None:
    """Writes images and their labels, as ultralytics reads them."""
    rng = np.random.default_rng(seed)
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(n_images):
        coarse = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        pen, lines = ImageDraw.Draw(image), []
        for _ in range(rng.integers(1, 5)):
            kind, r = int(rng.integers(3)), float(rng.uniform(6, 16))
            x, y = rng.uniform(r, SIDE - r, 2)
            box, (red, green, blue) = (x - r, y - r, x + r, y + r), (int(v) for v in rng.integers(0, 256, 3))
            if kind == 0:
                pen.ellipse(box, fill=(red, green, blue))
            elif kind == 1:
                pen.rectangle(box, fill=(red, green, blue))
            else:
                pen.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=(red, green, blue))
            lines.append(f"{kind} {x / SIDE:.5f} {y / SIDE:.5f} {2 * r / SIDE:.5f} {2 * r / SIDE:.5f}")
        noisy = np.asarray(image) + rng.normal(0, 12, (SIDE, SIDE, 3))
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(folder / "images" / f"{i:05}.png")
        (folder / "labels" / f"{i:05}.txt").write_text("\n".join(lines) + "\n")


def read(folder: Path, n_images: int) -> Tensor:
    """The first images as the network gets them: RGB, 0 to 1."""
    files = sorted((folder / "images").glob("*.png"))[:n_images]
    return torch.stack([torch.tensor(np.asarray(Image.open(file))).permute(2, 0, 1) for file in files]).float() / 255


class Walk:
    """A data set and a trained network in a folder, and what was measured."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self.values = folder.resolve(), folder.resolve() / "shapes.yaml", dict[str, Any]()
        if not self.data.exists():
            draw(folder / "train", N_TRAIN, seed=0)
            draw(folder / "val", N_VAL, seed=1)
            names = "{0: circle, 1: square, 2: triangle}"
            self.data.write_text(
                f"path: {self.folder}\ntrain: train/images\nval: val/images\nnames: {names}\n", encoding="utf-8"
            )
        self.weights = self.folder / "runs" / "dense" / "weights" / "best.pt"
        if not self.weights.exists():
            self.train(YOLO("yolo11n.yaml"), "dense", epochs=EPOCHS, lr0=2e-3, close_mosaic=4)
        self.images = read(self.folder / "train", N_CALIBRATION)

    @property
    def shared(self) -> dict[str, Any]:
        return {
            "data": str(self.data), "imgsz": SIDE, "device": "cpu", "workers": 0, "plots": False,
            "project": str(self.folder / "runs"), "exist_ok": True, "verbose": False,
        }  # fmt: skip

    def train(self, yolo: YOLO, name: str, **options: Any) -> None:
        yolo.train(name=name, batch=32, seed=0, amp=False, optimizer="AdamW", **self.shared, **options)

    def dense(self) -> YOLO:
        return YOLO(str(self.weights))

    def measure(self, name: str, model: nn.Module, **more: float) -> None:
        """Adds the mAP of a network to the figures, and writes them."""
        yolo = self.dense()
        yolo.model = copy.deepcopy(model)
        self.keep(name, yolo.val(name="val", batch=64, **self.shared).box, **more)

    def keep(self, name: str, box: Any, **more: float) -> None:
        self.values[name] = {"map50": round(float(box.map50), 4), "map": round(float(box.map), 4), **more}
        print(name, self.values[name], flush=True)
        write_figures("detector", WORK, self.values)

    def tune(self, name: str, yolo: YOLO, **options: Any) -> None:
        """Trains for a few epochs more, and measures the network of the checkpoint as another program loads it."""
        self.train(yolo, name, epochs=TUNING_EPOCHS, lr0=1e-3, close_mosaic=TUNING_EPOCHS, warmup_epochs=0, **options)
        sipp.release(yolo.model)
        yolo.save(self.folder / f"{name}.pt")
        self.keep(name, YOLO(self.folder / f"{name}.pt").val(name="val", batch=64, **self.shared).box)


# --- parts ------------------------------------------------------------------------------------------------------------


def without_training(walk: Walk) -> None:
    model = walk.dense().model
    walk.measure("dense", model)
    for keep in KEEPS:
        for name, options in (("magnitude", {"method": "magnitude"}), ("default", {}), ("repaired", {"repair": True})):
            pruned = sipp.prune(model, walk.images, keep=keep, exclude=FIXED, progress=False, **options)
            walk.measure(f"{name} {keep}", pruned.model)


def with_training(walk: Walk) -> None:
    for keep in TUNED_KEEPS:
        yolo = walk.dense()
        pruned = sipp.prune(yolo.model, walk.images, keep=keep, exclude=FIXED, progress=False)
        walk.measure(f"default {keep}", pruned.model)
        yolo.model.load_state_dict(pruned.model.state_dict())
        hold_in(yolo, pruned)
        walk.tune(f"tuned {keep}", yolo)
        saved = YOLO(walk.folder / f"tuned {keep}.pt").model
        if any((saved.get_parameter(name)[~mask] != 0).any() for name, mask in pruned.masks.items()):
            raise SystemExit("a pruned weight came back")
    walk.tune("dense, trained on", walk.dense())


def hold_in(yolo: YOLO, pruned: sipp.Pruned) -> None:
    """Keeps the zeros in the network that is trained and in its average, which is what ultralytics saves."""

    def hold(trainer: Any) -> None:
        sipp.hold(trainer.model, pruned, optimizer=trainer.optimizer)
        sipp.hold(trainer.ema.ema, pruned)

    yolo.add_callback("on_train_start", hold)


def with_fewer_channels(walk: Walk) -> None:
    yolo = walk.dense()
    small = sipp.shrink(yolo.model, walk.images, multiply_adds=MULTIPLY_ADDS, exclude=FIXED, progress=False)
    share = round(small.n_parameters / small.n_parameters_before, 4)
    walk.measure(f"shrunk {MULTIPLY_ADDS}", small.model, parameters=share)

    class Trainer(DetectionTrainer):  # ultralytics would build the network again from its YAML file, at full size
        def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
            return small.model.requires_grad_()  # those of a checkpoint are frozen

    walk.tune(f"shrunk {MULTIPLY_ADDS}, tuned", yolo, trainer=Trainer)


def with_certificates(walk: Walk) -> None:
    """How small the error of the whole output looks for a network that finds next to nothing."""
    model, new = walk.dense().model, read(walk.folder / "val", N_VAL)
    pruned = sipp.prune(model, None, keep=0.2, method="magnitude", floor=0.1, exclude=FIXED, progress=False)
    parts: dict[str, Any] = {"whole output": 0, "class scores": lambda out: out[0][:, 4:]}
    for name, output in parts.items():
        certificate = sipp.certify(model, pruned, new, output=output, progress=False)
        walk.values[f"certificate, {name}"] = {"percent": round(100 * certificate.epsilon, 2)}
    write_figures("detector", WORK, walk.values)
    print(walk.values)


PARTS: dict[str, Callable[[Walk], None]] = {
    "training": with_training,
    "shrink": with_fewer_channels,
    "no-training": without_training,
    "certificates": with_certificates,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where images, checkpoints and logs are written")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", DeadRowsWarning)
    walk = Walk(arguments.folder)
    for part in arguments.only:
        PARTS[part](walk)
    rows = [(name, one["map50"], one["map"]) for name, one in walk.values.items() if "map" in one]
    table(WORK, ("network", "mAP 50", "mAP 50 to 95"), rows)


if __name__ == "__main__":
    main()
