"""Pruned networks made smaller by `sipp.shrink`: parameters, multiply-adds and seconds before and after, in one run.

    python benchmarks/bench_shrink.py --epochs 180                 # trained on digits of 32 x 32; for a GPU
    python benchmarks/bench_shrink.py --epochs 40 --cifar10 data/ --save trained/       # on CIFAR-10; for a GPU
    python benchmarks/bench_shrink.py --trained trained/ --device cpu                   # the same networks on a CPU
    python benchmarks/bench_shrink.py --method snip                # pruned before any training
    python benchmarks/bench_shrink.py resnet20 --weights resnet20-cifar10.safetensors   # as published, not retrained
    python benchmarks/bench_shrink.py --networks 300               # 300 random networks, equal before and after

With --epochs a network is trained, cut to each keep in turn and retrained with its zeros held, for half as long;
--save writes them as NAME-KEEP.pt for --trained. Both
networks are dense ones, run by torch in inference mode; they take turns, and the best of each counts. What gives other
outputs is not timed. It runs on a GPU where there is one (`--device cpu` to stay off it): there calls are recorded in a
CUDA graph. With --sparse `sipp.sparse` runs both instead, on the CPU. With --busy: the CPU time of one thread, for a
machine that others use too.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from common import alternate, clock_for, table
from safetensors.torch import load_file
from torch import Tensor, nn

import sipp
from sipp.results.shrunk import Shrunk
from sipp_lab.data.images import ImageSet, draw_shifts, normalise, shift
from sipp_lab.data.sets import load_cifar10, load_digits
from sipp_lab.nets import build

KEEPS = (0.05, 0.02)
Network = Callable[[Tensor], Tensor]
BATCH = 64
N_POINTS = 64  # that choose what is kept, where the method asks for data
TOLERANCE = 1e-4  # of the largest output
RATE, DECAY = 0.05, 5e-3  # a few thousand steps are to make weights small that nobody needs
CIFAR_BATCH, CIFAR_RATE, CIFAR_DECAY = 256, 0.2, 5e-4


def digits(device: str) -> ImageSet:
    """The embedded digits as colour images of 32 x 32."""
    data = load_digits()
    images = F.interpolate(data.images, size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1)
    images = ((images - images.mean()) / images.std()).contiguous()
    return ImageSet("digits of 32 x 32", images, data.labels, data.n_train, data.n_classes).to(device)


def cifar10(folder: Path, device: str) -> ImageSet:
    """CIFAR-10, normalised."""
    data = load_cifar10(folder)
    return ImageSet("cifar10", normalise(data.images), data.labels, data.n_train, data.n_classes).to(device)


def train(net: nn.Module, data: ImageSet, n_epochs: int) -> float:
    """Trains the network, whose zeros may be held; gives its accuracy on the test images, in per cent."""
    is_cifar, device = data.name == "cifar10", data.images.device
    size, rate, decay = (CIFAR_BATCH, CIFAR_RATE, CIFAR_DECAY) if is_cifar else (BATCH, RATE, DECAY)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
    per_epoch = data.n_train // size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=n_epochs * per_epoch)
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(n_epochs):
        order = torch.randperm(data.n_train, generator=generator, device=device)
        for batch in order.split(size)[:per_epoch]:
            images = data.images[batch]
            if is_cifar:
                images = shift(images, draw_shifts(len(images), generator))
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=is_cifar):
                loss = F.cross_entropy(net.train()(images), data.labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        found = torch.cat([net.eval()(part).argmax(1) for part in data.images[data.n_train :].split(1000)])
    return 100 * float((found == data.labels[data.n_train :]).float().mean())


def timed(before: Network, small: Network, x: Tensor, clock: Callable[[], float]) -> list[float]:
    """Seconds of a call of each."""
    with torch.inference_mode():
        with torch.backends.cudnn.flags(allow_tf32=False):  # whose rounding depends on the number of channels
            wanted, found = before(x), small(x)
        off = float((found - wanted).abs().max() / wanted.abs().max())
        if not off <= TOLERANCE:
            raise SystemExit(f"outputs differ by {off:.1e}: not timed")
        calls = [_call(net, x) for net in (before, small)]
        return alternate(*calls, clock=clock)


def _call(net: Network, x: Tensor) -> Callable[[], object]:
    """A call of the network on the CPU; on a GPU ten of them, recorded, and the wait for them."""
    if not x.is_cuda:
        return lambda: net(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            net(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            net(x)
    return lambda: (graph.replay(), torch.cuda.synchronize())


def row(name: str, keep: float, accuracy: str, small: Shrunk, seconds: list[float]) -> list[str]:
    per_call = 10 if next(small.model.parameters()).is_cuda else 1
    ms = [1e3 * one / per_call for one in seconds]
    sizes = (small.n_parameters_before, small.n_parameters, small.multiply_adds_before, small.multiply_adds)
    return [
        name, f"{keep:.0%}", accuracy, f"{sizes[0]:,}", f"{sizes[1]:,}", f"{sizes[0] / sizes[1]:.2f}",
        f"{sizes[2] / 1e6:,.1f}", f"{sizes[3] / 1e6:,.1f}", f"{sizes[2] / sizes[3]:.2f}",
        f"{ms[0]:.2f}", f"{ms[1]:.2f}", f"{ms[0] / ms[1]:.2f}",
    ]  # fmt: skip


def bench(name: str, given: argparse.Namespace, clock: Callable[[], float]) -> Iterator[list[str]]:
    """One row for each keep."""
    torch.manual_seed(0)
    net = build(name, n_classes=10).to(given.device)
    data = digits(given.device) if given.cifar10 is None else cifar10(given.cifar10, given.device)
    if given.weights is not None:
        net.load_state_dict(load_file(given.weights))
    if given.epochs:
        print(f"{name}: {train(net, data, given.epochs):.1f} % dense", flush=True)
    points = [(data.images[:N_POINTS], data.labels[:N_POINTS])]
    for keep in KEEPS:
        file = f"{name}-{keep}.pt"
        if given.trained is not None:
            net.load_state_dict(torch.load(given.trained / file, weights_only=True))
        pruned = sipp.prune(net.eval(), points, keep=keep, method=given.method, floor=0, progress=False)
        words = ""
        if given.epochs:
            net = pruned.model
            sipp.hold(net, pruned)
            words = f"{train(net, data, max(1, given.epochs // 2)):.1f} %"
            sipp.release(net)
        if given.save is not None:
            given.save.mkdir(exist_ok=True)
            torch.save(net.state_dict(), given.save / file)
        start = time.perf_counter()
        small = sipp.shrink(pruned.model.eval(), data.images[:1])
        taken = time.perf_counter() - start
        points_timed = data.images[:BATCH]
        before, after = (sipp.sparse(one, points_timed) if given.sparse else one.model for one in (pruned, small))
        made = row(name, keep, words, small, timed(before, after, points_timed, clock))
        print(*made, f"shrunk in {taken:.1f} s", flush=True)
        yield made


def search(n_networks: int) -> None:
    """Random networks through `shrink`: equal outputs on the example and on other points, or the seed is named."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from runtime.shrinkable_networks import network

    wrong, smaller = [], 0
    for seed in range(n_networks):
        net, x = network(seed, most_parts=6)
        small = sipp.shrink(net, x)
        smaller += small.n_parameters < small.n_parameters_before
        with torch.no_grad():
            for given in (x, torch.randn(5, *x.shape[1:]), 30 * torch.randn(1, *x.shape[1:])):
                wanted, found = net.double()(given.double()), small.model.double()(given.double())
                if not float((wanted - found).abs().max()) <= TOLERANCE * float(wanted.abs().max()):
                    wrong.append(seed)
    print(f"{n_networks} random networks: {smaller} smaller, outputs differ for {wrong or 'none'}")
    if wrong:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["resnet20", "vgg16"])
    parser.add_argument("--weights", type=Path, help="of the dense network; without, freshly initialised")
    parser.add_argument("--method", default="magnitude")
    parser.add_argument("--epochs", type=int, default=0, help="of the dense network; half of it after each cut")
    parser.add_argument("--cifar10", type=Path, help="its folder, to train on instead of digits")
    parser.add_argument("--save", type=Path, help="folder for the trained networks")
    parser.add_argument("--trained", type=Path, help="folder with networks of --save")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sparse", action="store_true", help="time sipp.sparse of both networks")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--networks", type=int, help="only compare so many random networks")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # rows that died
    if given.networks:
        search(given.networks)
        return
    clock = clock_for(given.busy)
    rows = [one for name in given.names for one in bench(name, given, clock)]
    header = [
        "network", "keep", "accuracy", "parameters", "after", "x", "M multiply-adds, one point", "after", "x",
        f"ms, {BATCH} points", "after", "x",
    ]  # fmt: skip
    where = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    table(
        f"{'sipp.sparse' if given.sparse else 'Dense'}, before and after shrink, {given.method}, {where}", header, rows
    )


if __name__ == "__main__":
    main()
