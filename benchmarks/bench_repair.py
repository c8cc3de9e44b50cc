"""Prints what `sipp.repair` brings back on published CIFAR-10 ResNets and on a sentence transformer.

    python benchmarks/bench_repair.py images --weights resnet20-cifar10.safetensors --data data/ --steps 0
    python benchmarks/bench_repair.py images --weights resnet20-cifar10.safetensors --data data/ --mirror
    python benchmarks/bench_repair.py images --weights resnet20-cifar10.safetensors --points 10000 --steps 2000
    python benchmarks/bench_repair.py sentences --encoder all-MiniLM-L6-v2/
    python benchmarks/bench_repair.py walk --weights resnet20-cifar10.safetensors --data data/

images: masks by `magnitude`, unlabelled training images for the repair, all 10,000 test images for the accuracy.
sentences: masks by `sipp-blend` and `magnitude`, 628 sentences for mask and repair, 400 others for the table.
walk: `prune_to(epsilon=0.2, share=0.05, repair=True)`, training images for the repair, test images for the certificate.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from common import table
from published import Images, accuracy, encoder, images_of, moved, outputs, resnet, same_neighbour, sentences
from torch import Tensor

import sipp

N_SENTENCES, N_NEW_SENTENCES = 628, 400
EPSILON, SHARE = 0.2, 0.05
HOLDOUT_BATCH = 250
PAD = 4  # pixels, as the published networks were trained

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, str]:
    """What the work gives, and its seconds: by the clock, and of the CPU by the number of threads."""
    start, cpu = time.perf_counter(), time.process_time()
    result = work()
    wall, used = time.perf_counter() - start, (time.process_time() - cpu) / torch.get_num_threads()
    return result, f"{wall:.1f} ({used:.1f})"


def points_of(images: Images, options: argparse.Namespace) -> list[Tensor]:
    """Batches of training images; `--mirror` and `--crops` add views of each image, in the same batch.

    A batch of 40 has 20 images and their 20 mirror images, so that the repair holds back all views of an image, or
    fits all of them.
    """
    n_views = 1 + options.mirror + options.crops
    if options.batch % (10 * n_views):
        raise SystemExit(f"--batch has to be a multiple of {10 * n_views}: ten images and their views")
    generator = torch.Generator().manual_seed(options.seed)
    batches = []
    for chunk in images.points(0, options.points).split(options.batch // n_views):
        views = [chunk] + [chunk.flip(3)] * options.mirror
        batches.append(torch.cat(views + [crops(chunk, generator) for _ in range(options.crops)]))
    return batches


def crops(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images moved by up to four pixels each way, with zeros beside them; one in two mirrored."""
    n, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (PAD,) * 4)
    at = torch.randint(2 * PAD + 1, (n, 2), generator=generator).tolist()
    moved = torch.stack([one[:, i : i + height, j : j + width] for one, (i, j) in zip(padded, at)])
    is_mirrored = torch.rand(n, generator=generator) < 0.5
    return torch.where(is_mirrored.view(-1, 1, 1, 1), moved.flip(3), moved)


def images_table(options: argparse.Namespace) -> None:
    """Prints one line a keep: accuracy of the pruned and the repaired network, and what the repair took."""
    images, net = images_of(options.data, options.seed), resnet(options.weights)
    points, steps, rate = points_of(images, options), options.steps, options.learning_rate
    lines = [["1", f"{accuracy(net, images):.2f}", *[""] * 4]]
    for keep in options.keep:
        pruned = sipp.prune(net, None, keep=keep, method="magnitude")
        fixed, took = timed(partial(sipp.repair, net, pruned, points, steps=steps, learning_rate=rate))
        done = fixed.repair
        assert done is not None
        errors = (done.output_before, done.output_after)
        shown = " / ".join("none" if error is None else f"{error:.3f}" for error in errors)
        best = "refit" if done.polish is None else f"{done.polish.best} of {steps}"
        scores = [f"{accuracy(model, images):.2f}" for model in (pruned.model, fixed.model)]
        lines.append([f"{keep:g}", *scores, best, shown, took])
        print(lines[-1], flush=True)
    mirror = (" and their mirror images" if options.mirror else "") + f", {options.crops} crops of each" * bool(
        options.crops
    )
    table(
        f"{options.weights.stem}: accuracy, %, on 10,000 test images; {options.points} training images{mirror} repair",
        ["keep", "pruned", "repaired", "best step", "output error: pruned / end", "s (CPU s a thread)"],
        lines,
    )


def sentences_table(options: argparse.Namespace) -> None:
    """Prints one line a mask: how far 95 % of the vectors of new sentences move at most, who keeps its neighbour."""
    net = encoder(options.encoder)
    data = sentences(options.encoder, 0, N_SENTENCES, options.seed)
    new = sentences(options.encoder, N_SENTENCES, N_NEW_SENTENCES, options.seed)
    dense, lines = outputs(net, new), []

    def shown(model: torch.nn.Module) -> list[str]:
        found = outputs(model, new)
        return [f"{moved(dense, found):.3f}", f"{same_neighbour(dense, found):.0f} %"]

    for keep in options.keep:
        for method in ("sipp-blend", "magnitude"):
            needed = None if method == "magnitude" else data  # its statements would take most of the time
            pruned, prune_time = timed(partial(sipp.prune, net, needed, keep=keep, method=method))
            fixed, took = timed(
                partial(sipp.repair, net, pruned, data, steps=options.steps, learning_rate=options.learning_rate)
            )
            lines.append([f"{keep:g}", method, *shown(pruned.model), prune_time, *shown(fixed.model), took])
            print(lines[-1], flush=True)
    columns = ("moved", "same neighbour", "s (CPU s a thread)")
    header = ["keep", "mask", *(f"{word}: {one}" for word in ("pruned", "repaired") for one in columns)]
    table(f"95 % of {N_NEW_SENTENCES} sentence vectors move less than, and keep their nearest neighbour", header, lines)


def walk_table(options: argparse.Namespace) -> None:
    """Prints the walk to the sparsest repaired network that is certified within the tolerance."""
    images, net = images_of(options.data, options.seed), resnet(options.weights)
    points, holdout = points_of(images, options), list(images.test[-options.holdout :].split(HOLDOUT_BATCH))
    walk = partial(sipp.prune_to, net, points, holdout, epsilon=EPSILON, share=SHARE)
    best, took = timed(partial(walk, method=options.method, repair=True))
    print(best)
    lines = [[f"{100 * best.keep:.1f} %", f"{accuracy(best.model, images):.2f}", len(best.path), took]]
    title = (
        f"{options.weights.stem}: sparsest certified, epsilon {EPSILON}, share {SHARE}, {options.method} and repair, "
    )
    title += f"{options.points} images to repair, {options.holdout} held out"
    table(title, ["keep", "accuracy, %", "levels tested", "s (CPU s a thread)"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("images", "sentences", "walk"))
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--method", default="sipp-blend", help="of the walk")
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--holdout", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=40, help="images a batch, for refit and polish")
    parser.add_argument("--mirror", action="store_true", help="give the mirror image of each image as well")
    parser.add_argument("--crops", type=int, default=0, help="give so many random crops of each image as well")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--keep", type=float, nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    needed = options.encoder if options.what == "sentences" else options.weights
    if needed is None:
        parser.error("the sentences need --encoder, images and walk need --weights")
    options.keep = options.keep or ([0.5] if options.what == "sentences" else [0.4, 0.3, 0.2, 0.1])
    {"images": images_table, "sentences": sentences_table, "walk": walk_table}[options.what](options)


if __name__ == "__main__":
    main()
