"""Zeros on a CUDA GPU: `sipp.sparse` and its kernels against torch dense, ratios within one run.

    python benchmarks/bench_gpu_runtime.py                       # all of it; two to three minutes on an H200
    python benchmarks/bench_gpu_runtime.py few decode 2:4 refused   # or some of it
    python benchmarks/bench_gpu_runtime.py --write       # into figures/runtime-h200.json

Kernels are timed in a CUDA graph over enough copies of a layer that none of them is found in the second-level cache;
networks as they are called from Python. Masks are those of magnitude pruning a layer, of random weights.
What disagrees with torch in float64 is not timed.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import write_figures
from torch import Tensor, nn

import sipp
from sipp.runtime.gpu import recording
from sipp.runtime.gpu.linear import FEW_TOKEN_SHAPES, LIMITS, LinearKernel, dense_kernel, time_kernel, walk_kernel
from sipp.runtime.sparse_network import Sparse

GOALS = {0.5: 1.3, 0.3: 1.9, 0.2: 2.7, 0.1: 4.5, 0.05: None}  # by the share kept, one token
SHAPES = [(4096, 4096), (11008, 4096), (4096, 11008)]  # rows x columns
WORK = (
    "one token in fp16, kernels alone, against torch dense in a CUDA graph; decode: eight blocks of Llama-7B's shape, "
    "256 cached tokens; by per cent of zeros"
)
PAST_THE_CACHE = 2  # times the second-level cache


def zeros(keep: float) -> str:
    """The per cent of zeros, as the figures name it."""
    return f"{round(100 * (1 - keep))}"


def thin(weight: Tensor, keep: float) -> Tensor:
    """The weight with the smallest magnitudes set to 0."""
    flat = weight.abs().flatten().float()
    bar = flat[torch.randint(len(flat), (1 << 20,), device=weight.device)].quantile(1 - keep)  # of a million of them
    return torch.where(weight.abs() > bar, weight, 0)


def random_weight(n_rows: int, n_columns: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(n_rows, n_columns, device="cuda") / n_columns**0.5).to(dtype)


def microseconds(way: LinearKernel, x: Tensor) -> float:
    """The time of a layer, over copies of its weights that fill the cache several times."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return time_kernel(way, x, max(2, -(-PAST_THE_CACHE * cache // way.n_bytes))) * 1e6


def read_bandwidth() -> float:
    """Bytes a second that a sum over two gigabytes reads."""
    large = torch.empty(1 << 31, dtype=torch.int8, device="cuda").random_().view(torch.int32)
    return large.nbytes / recording.kernel_seconds([large.amax])


def few() -> dict[str, Any]:
    bandwidth = read_bandwidth()
    print(f"\nLinear layers on few tokens; the largest of two gigabytes is found at {bandwidth / 1e12:.2f} TB/s")
    print("  layer          dtype     tokens  zeros  dense us  sparse us  ratio  (goal)   MB (dense)  bandwidth  way")
    square, half = (4096, 4096), torch.float16
    cases = [(shape, half, 1, keep, False) for shape in SHAPES for keep in GOALS]
    cases += [(shape, half, 1, keep, True) for shape in SHAPES[:2] for keep in (0.5, 0.2, 0.1)]
    cases += [(square, dtype, 1, keep, False) for dtype in (torch.bfloat16, torch.float32) for keep in (0.5, 0.1)]
    cases += [(square, half, n_tokens, keep, False) for n_tokens in (2, 4, 8) for keep in (0.3, 0.1)]
    dense_us: dict[object, float] = {}
    found: dict[str, Any] = {}
    for (n_rows, n_columns), dtype, n_tokens, keep, as_int8 in cases:
        x, whole = torch.randn(n_tokens, n_columns, device="cuda").to(dtype), random_weight(n_rows, n_columns, dtype)
        kind = n_rows, n_columns, dtype, n_tokens
        if kind not in dense_us:
            dense_us[kind] = microseconds(dense_kernel(whole, None), x)
        weight, dense = thin(whole, keep), dense_us[kind]
        if as_int8:  # levels of a scale a row, as `sipp.save(values="int8")` leaves them
            scales = weight.abs().amax(-1, keepdim=True).float() / 127
            weight = ((weight / scales).round() * scales).to(dtype)
        expected = x.double() @ weight.double().t()
        best = (float("inf"), "", 0)
        for lanes, warps, ahead in FEW_TOKEN_SHAPES:
            way = walk_kernel(weight, None, (lanes, warps, ahead), as_int8)
            off_by = float((way.call(x, way.tensors).double() - expected).abs().max() / expected.abs().max())
            if not off_by <= LIMITS[dtype]:
                raise RuntimeError(f"off by {off_by:.1e}: not timed")
            best = min(
                best,
                (microseconds(way, x), f"{way.name}, {lanes} threads a row, {warps} warps, {ahead} ahead", way.n_bytes),
            )
        us, name, n_bytes = best
        wanted = f"({GOALS[keep]})" if GOALS[keep] and n_tokens == 1 and not as_int8 else ""
        print(
            f"  {n_rows:5} x {n_columns:5}  {str(dtype)[6:]:8} {n_tokens:6}  {1 - keep:5.0%}  {dense:8.2f}  {us:9.2f}  "
            f"{dense / us:5.2f}  {wanted:6}  {n_bytes / 1e6:5.1f} ({whole.nbytes / 1e6:5.1f})  "
            f"{n_bytes / us * 1e6 / bandwidth:9.0%}  {name}",
            flush=True,
        )
        if dtype is half and n_tokens == 1:
            at = found.setdefault("int8", {}) if as_int8 else found
            at.setdefault(f"{n_rows}x{n_columns}", {})[zeros(keep)] = round(dense / us, 2)
    return found


class Block(nn.Module):
    """A block of Llama-7B's shape: one new token that attends to a cache of `n_cached` others."""

    def __init__(self, width: int = 4096, hidden: int = 11008, heads: int = 32, n_cached: int = 256) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, heads, n_cached, width // heads))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        n = len(x)
        keys = torch.cat((self.keys.expand(n, -1, -1, -1), k), 2)
        values = torch.cat((self.values.expand(n, -1, -1, -1), v), 2)
        x = x + self.o(F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def compared(model: nn.Module, x: Tensor) -> tuple[Sparse, list[float], float]:
    """The compiled network; ms of the model as called and recorded, and of it; how far it is off."""
    fast, recorded = sipp.sparse(model, x), recording.Recorded(lambda given: model(*given), [x])
    times = recording.race([partial(model, x), partial(recorded, [x]), partial(fast, x)])
    expected = model(x).double()
    off_by = float((fast(x).double() - expected).norm() / expected.norm())
    return fast, [seconds * 1e3 for seconds in times], off_by


@torch.no_grad()
def decode(n_blocks: int = 8) -> dict[str, Any]:
    print(f"\nA decode step of {n_blocks} blocks of Llama-7B's shape, fp16, one token, as called from Python")
    print("  zeros  ms as called  ms recorded  ms sipp.sparse  tokens/s recorded  sipp.sparse  ratio  off by")
    with torch.device("cuda"):
        model = nn.Sequential(*(Block() for _ in range(n_blocks))).half().eval()
    x = torch.randn(1, 1, 4096, device="cuda").half()
    whole = {name: p.clone() for name, p in model.named_parameters() if p.ndim == 2}
    found = {}
    for keep in (0.5, 0.3, 0.1):
        for name, weight in whole.items():
            model.get_parameter(name).copy_(thin(weight, keep))
        fast, (called, recorded, ours), off_by = compared(model, x)
        n_sparse = sum(step.kernel.startswith("walks") for step in fast.steps)
        print(
            f"  {1 - keep:5.0%}  {called:12.3f}  {recorded:11.3f}  {ours:14.3f}  {1e3 / recorded:17.0f}  "
            f"{1e3 / ours:11.0f}  {recorded / ours:5.2f}  {off_by:.0e}; {n_sparse} sparse products, compiled in "
            f"{fast.seconds:.0f} s",
            flush=True,
        )
        found[zeros(keep)] = round(recorded / ours, 2)
    return {"decode": found}


@torch.no_grad()
def two_of_four() -> dict[str, Any]:
    print("\n2:4, four linear layers of 4096 x 4096 with a ReLU between, as called from Python (goal: 1.3)")
    print("  dtype     tokens  ms as called  ms recorded  ms sipp.sparse  ratio  off by  runs")
    found: dict[str, dict[str, float]] = {}
    for dtype in (torch.float16, torch.bfloat16):
        layers: list[nn.Module] = []
        for _ in range(4):
            layer = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=dtype)
            by_four = random_weight(4096, 4096, dtype).mul_(2).view(4096, -1, 4)
            layer.weight.copy_(by_four.scatter(-1, by_four.abs().argsort(-1)[..., :2], 0).view(4096, 4096))
            layers += [layer, nn.ReLU()]
        for n_tokens in (256, 1024, 2048, 4096, 8192)[dtype is torch.bfloat16 :]:
            x = torch.randn(n_tokens, 4096, device="cuda").to(dtype)
            fast, (called, recorded, ours), off_by = compared(nn.Sequential(*layers), x)
            kernels = sorted({step.kernel for step in fast.steps if step.held})
            print(
                f"  {str(dtype)[6:]:8}  {n_tokens:6}  {called:12.3f}  {recorded:11.3f}  {ours:14.3f}  "
                f"{min(called, recorded) / ours:5.2f}  {off_by:.0e}  {fast.latest.how}: {', '.join(kernels)}",
                flush=True,
            )
            name = "fp16" if dtype is torch.float16 else "bf16"
            found.setdefault(name, {})[str(n_tokens)] = round(min(called, recorded) / ours, 2)
    return {"2:4": found}


@torch.no_grad()
def refused() -> dict[str, Any]:
    """What was tried once, by cuSPARSE on kept weights and on inputs unfolded into columns, and lost."""
    print("\nTried and refused, fp16, recorded kernels: torch dense against a sparse product of cuSPARSE")
    print("  layer                                       zeros  dense us  sparse us  ratio")
    for what, n_points, shape, side in (
        ("convolution 256 -> 256, 3 x 3", 1, (256, 256, 3), 14),
        ("convolution 512 -> 512, 3 x 3", 1, (512, 512, 3), 7),
        ("convolution 64 -> 64, 3 x 3", 32, (64, 64, 3), 56),
        ("linear 4096 x 4096, 64 tokens", 64, (4096, 4096, 1), 1),
        ("linear 4096 x 4096, 1,024 tokens", 1024, (4096, 4096, 1), 1),
    ):
        n_out, n_in, k = shape
        weight = torch.randn(n_out, n_in, k, k, device="cuda").half() / (n_in * k * k) ** 0.5
        x = torch.randn(n_points, n_in, side, side, device="cuda").half()
        by_torch = (
            partial(F.conv2d, x, weight, padding=k // 2)
            if k > 1
            else partial(F.linear, x[..., 0, 0], weight[..., 0, 0])
        )
        dense = recording.kernel_seconds([by_torch]) * 1e6
        for keep in (0.1, 0.05, 0.02):
            kept = thin(weight.flatten(1), keep).to_sparse_csr()

            def gathered(x: Tensor = x, kept: Tensor = kept, k: int = k) -> Tensor:
                columns = F.unfold(x, k, padding=k // 2).transpose(0, 1).flatten(1) if k > 1 else x.flatten(1).t()
                return kept @ columns

            head = f"  {what:32} x {n_points:4} point(s)  {1 - keep:5.0%}  {dense:8.2f}"
            try:
                sparse = recording.kernel_seconds([gathered]) * 1e6
                print(f"{head}  {sparse:9.2f}  {dense / sparse:5.2f}", flush=True)
            except RuntimeError as error:
                print(f"{head}  refused: {str(error)[:60]}", flush=True)
    return {}


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA GPU here: nothing is timed")
        return
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    parts = {"few": few, "decode": decode, "2:4": two_of_four, "refused": refused}
    asked = [name for name in sys.argv[1:] if name != "--write"]
    found: dict[str, Any] = {}
    for name in asked or parts:
        found |= parts[name]()
    if "--write" in sys.argv:
        write_figures("runtime-h200", WORK, found)


if __name__ == "__main__":
    main()
