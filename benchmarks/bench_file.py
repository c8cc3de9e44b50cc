"""Prints how small the file of a pruned network is, how long it takes, and what rounding its values costs.

    python benchmarks/bench_file.py                                # sizes of all built-in networks; minutes
    python benchmarks/bench_file.py --nets resnet20 vgg16
    python benchmarks/bench_file.py --times resnet101
    python benchmarks/bench_file.py --weights resnet20-cifar10.safetensors --data data/     # the accuracy of each

The networks are untrained, with random numbers in norms and biases (constants would be cheaper). Masks: `magnitude`
cuts the whole network at one size, so that layers differ; `even` draws the same share of every layer, the hardest case.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from common import table, write_figures
from safetensors.torch import load_file, save as dense_file
from torch import nn

import sipp
from sipp.results.options import Precision
from sipp.results.saved_file import SavedFile, entropy_bytes
from sipp_lab.data.images import normalise
from sipp_lab.data.sets import load_cifar10
from sipp_lab.nets import build
from sipp_lab.nets.registry import NETS

KEEPS = (0.5, 0.3, 0.1, 0.05, 0.02)
VALUES: tuple[Precision, ...] = ("fp32", "lossless", "fp16", "bf16", "int8")
FACTOR, ADDED = 1.03, 16 * 1024  # what a file may take above values and entropy
ACCURACY_KEEPS = (1.0, 0.5, 0.2, 0.1)
EXACT = ("fp32", "lossless")  # the same network
QUOTED_KEEP = 0.1
WORK = (
    "keep 0.1 by magnitude, untrained networks with random numbers in norms and biases; times smaller than the dense "
    "fp32 file"
)
N_REPAIR = 1024  # training images without labels, on which kept weights are refitted
BATCH = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=[*NETS], choices=[*NETS])
    parser.add_argument("--times", choices=[*NETS], help="only how long saving and loading takes")
    parser.add_argument("--weights", type=Path, help="of a CIFAR-10 ResNet20: only the accuracy")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10")
    parser.add_argument("--keeps", nargs="*", type=float, help="other shares than the usual ones")
    parser.add_argument("--write", action="store_true", help="write the figures of keep 0.1 by magnitude")
    parser.add_argument("--test-images", type=int, default=10_000, help="of CIFAR-10, for the accuracy")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.sipp.safetensors"
        if args.weights:
            accuracies(args.weights, args.data, path, args.keeps or ACCURACY_KEEPS, args.test_images)
        elif args.times:
            times(args.times, path)
        else:
            found = sizes(args.nets, path, args.keeps or KEEPS)
            if args.write:
                write_figures("files", WORK, found)


def network(name: str) -> nn.Module:
    """A network with random numbers everywhere."""
    torch.manual_seed(0)
    net = build(name).eval()
    with torch.no_grad():
        for value in net.state_dict().values():
            if value.dim() == 1:
                value.copy_(torch.rand(value.shape) + 0.5)
    return net


def even(net: nn.Module, names: list[str], keep: float) -> nn.Module:
    """The network with the same share kept in every layer, at random."""
    with torch.no_grad():
        for name in names:
            weight = net.get_parameter(name)
            weight.copy_(torch.where(torch.rand(weight.shape) < keep, weight, 0.0))
    return net


def sizes(names: list[str], path: Path, keeps: Sequence[float]) -> dict[str, dict[str, float]]:
    """How many times smaller than the dense fp32 file, and the share of the bytes allowed that is used.

    Returns the figures of `QUOTED_KEEP`.
    """
    rows, worst = [], 0.0
    found: dict[str, dict[str, float]] = {}
    for name in names:
        dense = len(dense_file(network(name).state_dict()))
        for keep in keeps:
            pruned = sipp.prune(network(name), None, keep=keep, method="magnitude")
            uniform = even(network(name), [*pruned.masks], keep)
            for kind in ("magnitude", "even"):
                files = []
                for values in VALUES:
                    files.append(sipp.save(pruned if kind == "magnitude" else uniform, path, values=values))
                shares = [one.n_bytes / allowed(one) for one in files]
                worst = max(worst, *shares)
                kept = pruned.model if kind == "magnitude" else uniform
                zipped = len(gzip.compress(dense_file(kept.state_dict())))  # what anyone has: zeros in place, then gzip
                smaller = [f"{dense / n_bytes:.2f}" for n_bytes in (zipped, *(one.n_bytes for one in files))]
                if keep == QUOTED_KEEP and kind == "magnitude":
                    found[name] = {"dense_bytes": dense, **dict(zip(("gzip", *VALUES), map(float, smaller)))}
                rows.append((name, keep, kind, f"{dense:,}", *smaller, *(f"{share:.3f}" for share in shares)))
                print(*rows[-1], flush=True)
    ratios = [f"{name} x" for name in ("gzip", *VALUES)]
    header = ("network", "keep", "masks", "dense bytes", *ratios, *(f"{v} used" for v in VALUES))
    table("Times smaller than the dense fp32 file; share of the allowed bytes that is used", header, rows)
    print(f"\nallowed: {FACTOR} x (values + n H(keep) / 8) + {ADDED:,} bytes; most used: {worst:.3f}")
    return found


def allowed(contents: SavedFile) -> float:
    """1.03 (values + n H(keep) / 8) + 16 KiB, with the keep of the whole network."""
    masked = [one for one in contents.tensors if one.kept < one.n_weights]
    entropy = entropy_bytes(sum(one.n_weights for one in masked), sum(one.kept for one in masked))
    return FACTOR * (sum(one.value_bytes for one in contents.tensors) + entropy) + ADDED


def times(name: str, path: Path) -> None:
    """Seconds by the clock and of the processor, to save and to load into a model."""
    pruned = sipp.prune(network(name), None, keep=0.1, method="magnitude")
    other, rows = network(name), []
    for values in VALUES:
        wall, busy = time.perf_counter(), time.process_time()
        sipp.save(pruned, path, values=values)
        saved = (time.perf_counter() - wall, time.process_time() - busy)
        wall, busy = time.perf_counter(), time.process_time()
        sipp.load(path, into=other)
        rows.append((values, *saved, time.perf_counter() - wall, time.process_time() - busy))
    cells = [(row[0], *(f"{value:.2f}" for value in row[1:])) for row in rows]
    table(f"{name}, keep 0.1: seconds", ("values", "save", "(processor)", "load", "(processor)"), cells)


def accuracies(weights: Path, data: Path, path: Path, keeps: Sequence[float], n_test: int) -> None:
    """CIFAR-10 test accuracy of the network as the file gives it back."""
    images = load_cifar10(data)
    points = normalise(images.images[images.n_train :][:n_test])
    labels = images.labels[images.n_train :][:n_test]
    net, other = build("resnet20").eval(), build("resnet20").eval()
    net.load_state_dict(load_file(weights))
    chosen = torch.randperm(images.n_train, generator=torch.Generator().manual_seed(0))[:N_REPAIR]
    training = normalise(images.images[chosen])
    dense, rows = len(dense_file(net.state_dict())), []
    for keep in keeps:
        pruned = sipp.prune(net, None, keep=keep, method="magnitude", floor=0.1)
        pruned = sipp.repair(net, pruned, training) if keep < 1 else pruned
        for values in VALUES:
            contents = sipp.save(pruned, path, values=values)
            sipp.load(path, into=other)
            if values not in EXACT[1:]:
                with torch.inference_mode():
                    n_right = sum(
                        int((other(x).argmax(1) == y).sum()) for x, y in zip(points.split(BATCH), labels.split(BATCH))
                    )
            largest = max(one.largest_change for one in contents.tensors)
            norm = max(one.norm_change for one in contents.tensors)
            ratio, share = dense / contents.n_bytes, n_right / len(points)
            cells = (f"{contents.n_bytes:,}", f"{ratio:.2f}", f"{share:.2%}", f"{largest:.2g}", f"{norm:.2g}")
            rows.append((keep, values, *cells))
            print(*rows[-1], flush=True)
    header = ("keep", "values", "bytes", "smaller x", "accuracy", "largest change", "norm change")
    table(
        f"ResNet20, {len(points):,} test images, magnitude, repaired on {N_REPAIR:,} images, no labels, not retrained",
        header,
        rows,
    )


if __name__ == "__main__":
    main()
