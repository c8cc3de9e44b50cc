"""Prints what each guarantee says of a published CIFAR-10 ResNet20: theory bound and certificate side by side.

    python benchmarks/bench_guarantees.py --weights resnet20-cifar10.safetensors --data data/
    python benchmarks/bench_guarantees.py --weights resnet20-cifar10.safetensors --data data/ --walk

The network was trained on the training images by others. Calibration points come from the training images, the
holdout is one half of the test images, and the other half checks what the certificates say.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from common import alternate, table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sipp
from sipp.certificates.measures import point_ratios
from sipp.pruning.cutting import cut, cut_rows, prepare_rows, write_rows
from sipp.pruning.ranking import rank
from sipp.results.binomial import upper_limit
from sipp.results.options import PruneOptions
from sipp.scoring.task import task_of
from sipp.verbs.prune import pruned_of
from sipp_lab.data.cifar10 import load_cifar10
from sipp_lab.data.transforms import normalise
from sipp_lab.nets import build

METHODS: tuple[str, ...] = ("magnitude", "sipp-det", "sipp-hybrid")
PARTS = ("calibration", "holdout", "fresh")
RANKINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *((method, method, {}) for method in METHODS),
    ("sipp-det, reduce=mean", "sipp-det", {"reduce": "mean"}),
)
KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
EPSILONS = (0.1, 0.2, 0.5)
SHARE, CONFIDENCE = 0.05, 0.95
PRUNE_DELTA = 1e-16
N_SOUND = 4  # points for the bound on the graph, which is far from useful here
N_LEVELS = 30
WALK_METHODS: tuple[str, ...] = ("sipp-det", "sipp-rand", "sipp-hybrid")
WALK_REPEATS = 5
SOUND_KEEPS = (0.9, 0.3)  # slow, and far from useful here: two rows show it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10, or a file written by --pack")
    parser.add_argument("--pack", type=Path, help="only write the images needed into one file, for another machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--walk", action="store_true", help="only what a walk over many levels costs")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    net = build("resnet20")
    net.load_state_dict(load_file(args.weights))
    net.eval()
    n_points = sipp.sample_size(net, torch.zeros(1, 3, 32, 32), delta=PRUNE_DELTA)
    images = load_file(args.data) if args.data.is_file() else chosen_images(args.data, n_points)
    if args.pack:
        save_file(images, args.pack)
        return
    net = net.to(args.device)
    calibration, holdout, fresh = (normalise(images[part]).to(args.device) for part in PARTS)
    if args.walk:
        cost_of_a_walk(net, calibration)
        return
    print(f"ResNet20, {n_points} calibration points (T4 at delta {PRUNE_DELTA:g}), {len(holdout)} holdout points")
    rankings = {
        name: rank(task_of(net, calibration), PruneOptions(method=method, **options))
        for name, method, options in RANKINGS
    }
    side_by_side(net, rankings, calibration, holdout, fresh)
    tolerance(net, calibration, holdout, fresh)
    cost_of_a_walk(net, calibration)


def chosen_images(folder: Path, n_points: int) -> dict[str, torch.Tensor]:
    """Calibration points from the training images, and two halves of the test images."""
    data = load_cifar10(folder)
    generator = torch.Generator().manual_seed(0)
    train = torch.randperm(data.n_train, generator=generator)[:n_points]
    test = data.n_train + torch.randperm(data.n_test, generator=generator)
    return {name: data.images[items] for name, items in zip(PARTS, (train, *test.chunk(2)))}


def side_by_side(net, rankings, calibration, holdout, fresh) -> None:  # type: ignore[no-untyped-def]
    """The theory bounds and the certificate for every method and keep, and the share of fresh points beyond it."""
    print("\n| method | keep | T12 (paper, no bound here) | T13 (sound) | T14 epsilon | fresh half beyond it |")
    print("|---|---|---|---|---|---|")
    for method, ranking in rankings.items():
        for keep in KEEPS:
            pruned = pruned_of(ranking, cut(ranking, round(keep * ranking.n_weights)))
            has_sound = method == "sipp-det" and keep in SOUND_KEEPS
            sound = sound_epsilon(net, pruned.model, calibration[:N_SOUND]) if has_sound else None
            sound_text = "" if sound is None else f"{sound:.1e}"
            cert = sipp.certify(net, pruned.model, holdout, share=SHARE, confidence=CONFIDENCE, calibration=calibration)
            beyond = float((relative_errors(net, pruned.model, fresh) > cert.epsilon).double().mean())
            paper = "none" if pruned.bound.epsilon is None else f"{pruned.bound.epsilon:.1e}"
            print(f"| {method} | {keep} | {paper} | {sound_text} | {cert.epsilon:.4f} | {beyond:.2%} |", flush=True)


@torch.no_grad()
def relative_errors(dense: nn.Module, pruned: nn.Module, images: Tensor) -> Tensor:
    """How far the output of each image moved, relative to its norm (T14)."""
    return torch.cat([point_ratios(dense(batch), pruned(batch)) for batch in images.split(500)])


def sound_epsilon(dense, pruned, points) -> float | None:  # type: ignore[no-untyped-def]
    """The bound of T13, on the CPU: many small decompositions in float64."""
    import copy

    networks = copy.deepcopy(dense).cpu(), copy.deepcopy(pruned).cpu()
    return sipp.assess(*networks, points.cpu(), bound="sound", holdout=points.cpu()).bound.epsilon


def tolerance(net, calibration, holdout, fresh) -> None:  # type: ignore[no-untyped-def]
    """The sparsest network certified for each tolerance, and whether the fresh half agrees."""
    print(
        f"\n| method | epsilon | keep certified (share {SHARE}, confidence {CONFIDENCE}) | fresh half beyond epsilon |"
    )
    print("|---|---|---|---|")
    for method in METHODS:
        for epsilon in EPSILONS:
            best = sipp.prune_to(
                net, calibration, holdout, epsilon=epsilon, share=SHARE, confidence=CONFIDENCE, method=method
            )
            n_beyond = int((relative_errors(net, best.model, fresh) > epsilon).sum())
            limit = upper_limit(n_beyond, len(fresh), 1 - CONFIDENCE)
            share = n_beyond / len(fresh)
            print(f"| {method} | {epsilon} | {best.keep:.2%} | {share:.2%} (at most {limit:.2%}) |", flush=True)


def cost_of_a_walk(net, calibration) -> None:  # type: ignore[no-untyped-def]
    """Scoring once and setting 30 levels, over one pruning; the holdout's forward passes are left out of both.

    Scoring is the same for all methods: the best time of all is taken for each.
    """
    sparse = build("resnet20").to(calibration.device)
    scored, once, walked = {}, {}, {}
    for method in WALK_METHODS:

        def score(method: str = method) -> None:
            rankings[method] = rank(task_of(net, calibration), PruneOptions(method=method))

        def prune_once(method: str = method) -> None:
            cut(rankings[method], rankings[method].n_weights // 2)

        def walk(method: str = method) -> None:
            ranking = rankings[method]
            uncut = prepare_rows(ranking, many_budgets=True)
            for level in range(1, N_LEVELS + 1):
                budget = ranking.n_weights * level // (N_LEVELS + 1)
                write_rows(sparse, ranking, cut_rows(ranking, uncut, budget, seed=0)[0])

        scored[method], once[method], walked[method] = score, prune_once, walk
    rankings: dict[str, Any] = {}
    steps = [part[method] for part in (scored, once, walked) for method in WALK_METHODS]
    times = alternate(*steps, repeats=WALK_REPEATS)
    n = len(WALK_METHODS)
    scoring = min(times[:n])
    rows = []
    for i, method in enumerate(WALK_METHODS):
        pruning, walking = scoring + times[n + i], scoring + times[2 * n + i]
        per_level = f"{times[2 * n + i] / N_LEVELS * 1e3:.1f} ms"
        rows.append((method, f"{pruning:.3f} s", f"{walking:.3f} s", f"{walking / pruning:.2f}", per_level))
    title = f"Scoring once and {N_LEVELS} levels beside one pruning, {len(calibration)} images"
    table(title, ("method", "one pruning", "scoring and levels", "ratio", "a level"), rows)


if __name__ == "__main__":
    main()
