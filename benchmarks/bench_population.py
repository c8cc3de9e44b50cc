"""How much one step of P networks side by side costs, against a step of one (train.together; needs a GPU).

    python benchmarks/bench_population.py --together 16 24 --net resnet20

Both steps are compiled and recorded, in bfloat16, on random images of CIFAR-10's size; the time is the best of five
times 100 steps. The goal was 16 networks of ResNet20 for at most 5 times one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from sipp.experiments.nets import build
from sipp.experiments.recipes.schema import Decay, Training
from sipp.experiments.training.loop import make_train_step, new_state
from sipp.experiments.training.population import Member, make_program
from sipp.experiments.training.setup import device_named
from sipp.experiments.training.stacking import WELL_GROUPED
from sipp.experiments.training.step import training_stream

N_STEPS, N_TIMES, WARM = 100, 5, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--together", type=int, nargs="+", default=[16])
    parser.add_argument("--net", default="resnet20")
    parser.add_argument("--batch", type=int, default=128)
    args = parser.parse_args()
    device = device_named("cuda")
    hyper = Training(
        optimizer="sgd",
        momentum=0.9,
        epochs=1,
        warmup_epochs=0.0,
        batch_size=args.batch,
        rate=0.1,
        decay=Decay(factor=1.0, every=1),
        weight_decay=1e-4,
        augment=False,
        precision="bfloat16",
        step="compiled",
    )
    with training_stream(device):
        images = torch.randn(args.batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, 10, (args.batch,), device=device)
        state = new_state(build(args.net, n_classes=10).to(device, memory_format=torch.channels_last), hyper)
        alone = make_train_step(state, hyper, "compiled")
        one = milliseconds(lambda: alone(images, labels, 0.1, args.batch))
        print(f"{args.net}, batch {args.batch}, {torch.cuda.get_device_name()}: one network {one:.3f} ms a step")
        for n_nets in args.together:
            torch._dynamo.reset()
            print(f"{n_nets} together: {together(args.net, n_nets, hyper, device) / one:.2f} x one", flush=True)


def together(net: str, n_nets: int, hyper: Training, device: torch.device) -> float:
    """Milliseconds of a step of so many networks."""
    members = [Member(new_state(build(net, n_classes=10).to(device), hyper), 0) for _ in range(n_nets)]
    program = make_program(members, _feed(device), hyper)
    size = (hyper.batch_size, n_nets * WELL_GROUPED, 32, 32)
    images = torch.randn(size, dtype=torch.bfloat16, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (hyper.batch_size, n_nets), device=device)
    program.stacked.train()
    return milliseconds(lambda: program.step(images, labels, 0.1, hyper.batch_size))


def _feed(device: torch.device):  # type: ignore[no-untyped-def]
    from sipp.experiments.data import ImageSet, split_images
    from sipp.experiments.training.feed import Feed

    images = torch.zeros(40, 3, 32, 32, dtype=torch.uint8)
    data = ImageSet("cifar10", images, torch.zeros(40, dtype=torch.int64), 30, 10)
    return Feed(data.to(device), split_images(data, n_calibration=1, n_holdout=0, seed=0), 10, device)


def milliseconds(step: Callable[[], None]) -> float:
    """Of one step, the best of several stretches."""
    for _ in range(WARM):
        step()
    found = []
    for _ in range(N_TIMES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(N_STEPS):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / N_STEPS * 1e3)
    return min(found)


if __name__ == "__main__":
    main()
