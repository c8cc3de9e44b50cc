"""Prints what each guarantee says of a published CIFAR-10 ResNet20: theory bound and certificate side by side.

    python benchmarks/bench_guarantees.py --weights resnet20-cifar10.safetensors --data data/ [--write]

The network was trained on the training images by others. Calibration inputs come from the training images, the
holdout is one half of the test images, and the other half checks what the certificates say.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from common import write_figures
from safetensors.torch import load_file, save_file
from scipy.stats import beta
from torch import Tensor, nn

import sipp
from sipp_lab.data.images import normalise
from sipp_lab.data.sets import load_cifar10
from sipp_lab.nets import build

METHODS: tuple[str, ...] = ("magnitude", "sipp-det", "sipp-hybrid")
PARTS = ("calibration", "holdout", "fresh")
WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *((method, method, {}) for method in METHODS),
    ("sipp-det, reduce=mean", "sipp-det", {"reduce": "mean"}),
)
KEEPS = (0.9, 0.7, 0.5, 0.3)
EPSILONS = (0.1, 0.2, 0.5)
SHARE, CONFIDENCE = 0.05, 0.95
PRUNE_DELTA = 1e-16
N_SOUND = 4  # inputs for the bound on the graph, which is far from useful here
SOUND_KEEPS = (0.9, 0.3)  # slow, and far from useful here: two rows show it
WORK = (
    "published ResNet20, {n} calibration images, a holdout of 5,000 test images and 5,000 fresh ones; share 0.05, "
    "confidence 0.95; shares and keeps in per cent"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10, or a file written by --pack")
    parser.add_argument("--pack", type=Path, help="only write the images needed into one file, for another machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="write figures/guarantees.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    net = build("resnet20")
    net.load_state_dict(load_file(args.weights))
    net.eval()
    n_inputs = sipp.sample_size(net, torch.zeros(1, 3, 32, 32), delta=PRUNE_DELTA)
    images = load_file(args.data) if args.data.is_file() else chosen_images(args.data, n_inputs)
    if args.pack:
        save_file(images, args.pack)
        return
    net = net.to(args.device)
    calibration, holdout, fresh = (normalise(images[part]).to(args.device) for part in PARTS)
    print(f"ResNet20, {n_inputs} calibration images (T4 at delta {PRUNE_DELTA:g}), {len(holdout)} held out")
    found = {
        "methods": side_by_side(net, calibration, holdout, fresh),
        "prune_to": tolerance(net, calibration, holdout, fresh),
    }
    if args.write:
        write_figures("guarantees", WORK.format(n=n_inputs), found)


def chosen_images(folder: Path, n_inputs: int) -> dict[str, Tensor]:
    """Calibration inputs from the training images, and two halves of the test images."""
    data = load_cifar10(folder)
    generator = torch.Generator().manual_seed(0)
    train = torch.randperm(data.n_train, generator=generator)[:n_inputs]
    test = data.n_train + torch.randperm(data.n_test, generator=generator)
    return {name: data.images[items] for name, items in zip(PARTS, (train, *test.chunk(2)))}


def side_by_side(net: nn.Module, calibration: Tensor, holdout: Tensor, fresh: Tensor) -> dict[str, Any]:
    """The theory bounds and the certificate for every method and keep, and the share of fresh images beyond it."""
    print("\n| method | keep | T12 (paper, no bound here) | T13 (sound) | T14 epsilon | fresh half beyond it |")
    print("|---|---|---|---|---|---|")
    found: dict[str, Any] = {}
    for name, method, options in WAYS:
        for keep in KEEPS:
            pruned = sipp.prune(net, calibration, keep=keep, method=method, progress=False, **options)
            cert = sipp.certify(net, pruned, holdout, share=SHARE, confidence=CONFIDENCE, progress=False)
            beyond = float((relative_errors(net, pruned.model, fresh) > cert.epsilon).double().mean())
            one = {"epsilon": round(cert.epsilon, 4), "beyond": round(100 * beyond, 2)}
            if pruned.bound.epsilon is not None:
                one["T12"] = float(f"{pruned.bound.epsilon:.1e}")
            if method == "sipp-det" and not options and keep in SOUND_KEEPS:
                one["T13"] = float(f"{sound_epsilon(net, pruned.model, calibration[:N_SOUND]):.1e}")
            found.setdefault(name, {})[f"{keep:g}"] = one
            shown = (one.get("T12", ""), one.get("T13", ""), f"{cert.epsilon:.4f}", f"{beyond:.2%}")
            print(f"| {name} | {keep} |", " | ".join(map(str, shown)), "|", flush=True)
    return found


@torch.no_grad()
def relative_errors(dense: nn.Module, pruned: nn.Module, images: Tensor) -> Tensor:
    """How far the output of each image moved, relative to its norm (T14)."""
    errors = []
    for batch in images.split(500):
        f, g = dense(batch).double(), pruned(batch).double()
        errors.append((g - f).norm(dim=1) / f.norm(dim=1))
    return torch.cat(errors).nan_to_num(math.inf)


def sound_epsilon(dense: nn.Module, pruned: nn.Module, inputs: Tensor) -> float:
    """The bound of T13, on the CPU: many small decompositions in float64."""
    given = inputs.cpu()
    bound = sipp.assess(dense.cpu(), pruned.cpu(), given, bound="sound", holdout=given).bound.epsilon
    dense.to(inputs.device), pruned.to(inputs.device)
    return math.nan if bound is None else bound


def tolerance(net: nn.Module, calibration: Tensor, holdout: Tensor, fresh: Tensor) -> dict[str, Any]:
    """The sparsest network certified for each tolerance, and whether the fresh half agrees."""
    print(f"\n| method | epsilon | keep certified (share {SHARE}, confidence {CONFIDENCE}) | fresh half beyond |")
    print("|---|---|---|---|")
    found: dict[str, Any] = {}
    for method in METHODS:
        for epsilon in EPSILONS:
            best = sipp.prune_to(
                net, calibration, holdout, epsilon=epsilon, share=SHARE, confidence=CONFIDENCE, method=method
            )
            n_beyond = int((relative_errors(net, best.model, fresh) > epsilon).sum())
            limit = float(beta.ppf(CONFIDENCE, n_beyond + 1, len(fresh) - n_beyond))  # Clopper-Pearson
            one = {"keep": best.keep, "beyond": n_beyond / len(fresh), "at most": limit}
            found.setdefault(method, {})[f"{epsilon:g}"] = {key: round(100 * value, 2) for key, value in one.items()}
            print(f"| {method} | {epsilon} | {best.keep:.2%} | {one['beyond']:.2%} (at most {limit:.2%}) |", flush=True)
    return found


if __name__ == "__main__":
    main()
