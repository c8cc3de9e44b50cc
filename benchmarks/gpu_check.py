"""Prints whether the GPU kernels agree with the float64 reference, then how fast they are. Run on a CUDA machine:

PYTHONPATH=src python3 benchmarks/gpu_check.py [--skip-networks]

Nothing that disagrees is timed. Each line is printed as it is measured, and a failing line does not stop the others.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable

import torch
from common import write_figures

import sipp
from sipp.results import numerics
from sipp.scoring.kernels import gpu, reference
from sipp.scoring.kernels.protocol import Chunk
from sipp_lab.nets import build

SHAPE = (256, 2304, 16384)  # rows, fan-in, patches
TARGET_RATE = 10  # T pairs/s
AGREEMENT = 1e-5
AGREEMENT_SHAPES = (
    (1, 64, 128, 4096),
    (1, 5, 7, 33),
    (3, 17, 27, 1001),
    (1, 130, 300, 999),
    (64, 1, 9, 784),
    (1, 16, 147, 5000),
)
N_IMAGES, BATCH, SIDE = 256, 128, 224
LAYER_IMAGES = 16
LAYERS = ("conv1", "layer1.0.conv1", "layer2.1.conv2", "layer3.1.conv2", "layer4.1.conv2", "layer4.0.downsample.0")
SHOWN_KERNELS = 12
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
NETWORK_TARGETS = {"resnet18": 0.15, "resnet101": 0.8}  # seconds


def operands(groups: int, rows: int, fan_in: int, patches: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Non-negative patches, reciprocals of real denominators, signs: on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    a = torch.rand(groups, fan_in, patches, generator=generator, device="cuda")
    a = (a - 0.5).clamp(min=0)  # half of the activations are zero, as behind a ReLU
    weight = torch.randn(groups, rows, fan_in, generator=generator, device="cuda")
    return a, inverses(weight, a), weight > 0, weight


def inverses(weight: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """S x G x R x P: the reciprocals of the denominators of non-negative patches."""
    return numerics.inverse_or_zero(torch.stack((weight.clamp(min=0), (-weight).clamp(min=0))) @ a)


def max_times(a: torch.Tensor, inverse: torch.Tensor, positive: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function: the (max, x) product alone; its operands are laid out beforehand."""
    inverse_GPSR, best = inverse.permute(1, 3, 0, 2).contiguous(), torch.zeros(positive.shape, device=a.device)
    given = a, inverse_GPSR, inverse_GPSR.sum(1), positive.contiguous().view(torch.int8)
    return lambda: gpu._raised(*given, best.zero_())


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative disagreement; infinite where only one of both is zero or something is not finite."""
    if not bool(torch.isfinite(got).all()) or bool(((got == 0) != (expected == 0)).any()):
        return float("inf")
    return float(((got - expected).abs() / expected.abs().clamp(min=1e-300)).max())


def seconds(function: Callable[[], object], repeats: int = 10) -> float:
    """Best of several runs, after one to warm up, measured by events on the GPU."""
    function()
    best = float("inf")
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def check() -> None:
    """Refuses to go on where the (max, x) product, or a chunk, disagrees with the reference."""
    for shape in AGREEMENT_SHAPES:
        given = operands(*shape)[:3]
        error = worst(max_times(*given)().double(), reference.max_times(*given))
        if not error <= AGREEMENT:
            raise SystemExit(f"max_times disagrees with the reference at {shape}: {error:.2e}; not timed")
    print(f"max_times agrees with the reference at {len(AGREEMENT_SHAPES)} shapes", flush=True)
    a, _, _, weight = operands(2, 33, 300, 1000)
    factors = torch.ones(weight.shape[:2], dtype=torch.float64, device="cuda")
    sums, squares = gpu.sum_chunk(Chunk(a, 10, weight, factors, (True, False)))
    expected = reference.sum_chunk(Chunk(a.double(), 10, weight.double(), factors, (True, False)))
    found = (
        f"sums of a chunk worst {worst(sums[0].double(), expected[0][0]):.1e}, norms {worst(squares, expected[1]):.1e}"
    )
    print(f"{found} (at most {AGREEMENT:.0e} wanted)", flush=True)


def kernel_table() -> None:
    rows, fan_in, patches = SHAPE
    a, inverse, positive, weight = operands(1, *SHAPE)
    both = torch.cat((weight.clamp(min=0), (-weight).clamp(min=0)), 1)
    matmul = seconds(lambda: torch.bmm(weight, a))
    print(f"\nmax_times at {rows} x {fan_in} x {patches}; torch float32 matmul (no TF32) ", end="")
    print(f"{rows * fan_in * patches / matmul / 1e12:.2f} T multiply-adds/s; both quadrants {both.shape[1]} rows")
    rate = rows * fan_in * patches / seconds(max_times(a, inverse, positive)) / 1e12
    print(f"max_times {rate:.2f} T pairs/s, {rate / TARGET_RATE:.2f} x target", flush=True)


def layer_table() -> None:
    """The rate at the layers of a network, with its own activations: how much is skipped depends on them."""
    torch.manual_seed(0)
    model = build("resnet18").cuda().eval()
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0].detach()}))
    with torch.no_grad():
        model(torch.rand(LAYER_IMAGES, 3, SIDE, SIDE, device="cuda") * 2 - 1)
    for name in LAYERS:
        module = model.get_submodule(name)
        assert isinstance(module, torch.nn.Conv2d)
        unfolded = torch.nn.functional.unfold(
            inputs[name].clamp(min=0), module.kernel_size, stride=module.stride, padding=module.padding
        )
        a, weight = unfolded.transpose(0, 1).flatten(1)[None], module.weight.detach().flatten(1)[None]
        time_of = seconds(max_times(a, inverses(weight, a), weight > 0))
        shape = f"{weight.shape[1]} x {weight.shape[2]} x {a.shape[2]}"
        print(f"{name:22s} {shape:22s} {weight.numel() * a.shape[2] / time_of / 1e12:6.2f} T pairs/s", flush=True)


def network_line(name: str) -> dict[str, float]:
    """Sensitivities of a network over all images, against its forward pass, after a warm-up on one batch."""
    torch.manual_seed(0)
    model = build(name).cuda().eval()
    images = torch.rand(N_IMAGES, 3, SIDE, SIDE, device="cuda") * 2 - 1
    batches = list(images.split(BATCH))
    start = time.perf_counter()
    sipp.sensitivity(model, batches[:2])
    torch.cuda.synchronize()
    warm = time.perf_counter() - start
    best, mean, forward = float("inf"), float("inf"), float("inf")
    for _ in range(4):
        start = time.perf_counter()
        sipp.sensitivity(model, batches)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        start = time.perf_counter()
        sipp.sensitivity(model, batches, reduce="mean")
        torch.cuda.synchronize()
        mean = min(mean, time.perf_counter() - start)
        start = time.perf_counter()
        with torch.no_grad():
            for batch in batches:
                model(batch)
        torch.cuda.synchronize()
        forward = min(forward, time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{name:10s} {N_IMAGES} images: {best:6.3f} s (target {NETWORK_TARGETS[name]} s), forward {forward:.3f} s, "
        f"ratio {best / forward:.1f}, mean {mean:.3f} s, warm-up {warm:.1f} s, peak {peak:.1f} GiB",
        flush=True,
    )
    return {"max": round(best, 3), "mean": round(mean, 3), "forward": round(forward, 3)}


def kernel_shares(name: str) -> None:
    """What the GPU does in one scoring of a network, by kernel, beside the time that this takes by the clock.

    And the first batch alone: without maxima of earlier batches, little can be skipped.
    """
    torch.manual_seed(0)
    model = build(name).cuda().eval()
    batches = list((torch.rand(N_IMAGES, 3, SIDE, SIDE, device="cuda") * 2 - 1).split(BATCH))
    for n_batches in (1, len(batches)):
        some = batches[:n_batches]
        sipp.sensitivity(model, some)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            start = time.perf_counter()
            sipp.sensitivity(model, some)
            torch.cuda.synchronize()
            wall = time.perf_counter() - start
        rows = sorted(
            ((row.self_device_time_total, row.count, row.key) for row in profile.key_averages()), reverse=True
        )
        busy = sum(micros for micros, _, _ in rows) / 1e6
        waits = ", ".join(f"{count} {key}" for _, count, key in rows if key in WAITS)
        print(f"{name} {n_batches} batches: GPU busy {busy:.3f} s of {wall:.3f} s, profiled; {waits}", flush=True)
        for micros, count, key in rows[:SHOWN_KERNELS]:
            print(f"   {micros / 1e3:8.2f} ms {count:6d} x {key[:90]}", flush=True)


def network_agreement() -> None:
    """The scores of a small network on the GPU against the reference kernel on the same GPU."""
    torch.manual_seed(0)
    model = build("resnet20").cuda().eval()
    images = torch.rand(8, 3, 32, 32, device="cuda") * 2 - 1
    fast = sipp.sensitivity(model, [images])
    slow = sipp.sensitivity(model, [images], kernel="reference")
    error = max(float((fast[n] - slow[n]).abs().max()) for n in fast)
    print(f"\nresnet20 scores, largest difference from the reference kernel: {error:.1e}", flush=True)
    if not error <= AGREEMENT:
        raise SystemExit("the network's scores disagree: not timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-networks", action="store_true")
    parser.add_argument("--write", action="store_true", help="write figures/scoring-h200.json")
    options = parser.parse_args()
    import triton

    torch.backends.cuda.matmul.allow_tf32 = False
    print(
        torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, sys.version.split()[0]
    )
    check()
    steps: list[Callable[[], object]] = [kernel_table, layer_table]
    found: dict[str, dict[str, float]] = {}
    if not options.skip_networks:
        steps += [network_agreement, *((lambda n=name: found.update({n: network_line(n)})) for name in NETWORK_TARGETS)]
        steps += [(lambda n=name: kernel_shares(n)) for name in NETWORK_TARGETS]
    for step in steps:
        start = time.perf_counter()
        try:
            step()
        except (Exception, SystemExit):
            traceback.print_exc()
        print(f"   ({time.perf_counter() - start:.1f} s)", flush=True)
    if options.write:
        write_figures("scoring-h200", f"{N_IMAGES} images of {SIDE} x {SIDE} in batches of {BATCH}, seconds", found)


if __name__ == "__main__":
    main()
