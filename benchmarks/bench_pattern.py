"""2:4 pruning on a CUDA GPU: torch's semi-structured kernels against dense, speed and error, in one run.

    python benchmarks/bench_pattern.py            # under a minute; without a GPU it only checks the patterns

Each way is timed as called (torch prepares every sparse product anew) and recorded in a CUDA graph (kernels only).
Linear layers of transformer shapes, fp16, pruned by `sipp.prune(pattern="2:4", method="magnitude")`; the error is that
of the sparse kernel against the dense product of the same zeros. What a kernel refuses is a line of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product

import torch
from common import table
from torch import nn

import sipp

# name, outputs x inputs of each layer, tokens
CASES: list[tuple[str, list[tuple[int, int]], int]] = [
    ("4 layers 4096 x 1024", [(4096, 1024)] * 4, 4096),
    ("4 layers 4096 x 4096", [(4096, 4096)] * 4, 4096),
    ("4 layers 8192 x 8192", [(8192, 8192)] * 4, 4096),
    ("MiniLM block, 8 x 128 tokens", [(384, 384)] * 4 + [(1536, 384), (384, 1536)], 1024),
    ("MiniLM block, 64 x 128 tokens", [(384, 384)] * 4 + [(1536, 384), (384, 1536)], 8192),
    ("BERT-base block, 64 x 128 tokens", [(768, 768)] * 4 + [(3072, 768), (768, 3072)], 8192),
]
Call = Callable[[], object]
N_CALLS, REPEATS, MOST_SECONDS = 10, 5, 2.0


def main() -> None:
    has_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if has_gpu else "no CUDA device: patterns only"
    print(f"torch {torch.__version__}, {where}", flush=True)
    rows = []
    for name, shapes, n_tokens in CASES if has_gpu else CASES[3:4]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(n_in, n_out) for n_out, n_in in shapes)
        pruned = sipp.prune(nn.Sequential(*layers), None, pattern="2:4", method="magnitude")
        broken = [key for key, mask in pruned.masks.items() if (mask.unflatten(1, (-1, 4)).sum(2) > 2).any()]
        head = (name, f"{pruned.keep:.2%}", "obeyed" if not broken else f"BROKEN by {broken}")
        for kernel, run in product(("cuSPARSELt", "CUTLASS"), RUNS) if has_gpu else ():
            try:
                cells = measure([*pruned.model], n_tokens, kernel, RUNS[run])
            except Exception as error:  # a kernel that is not there, or does not take a shape: said, not hidden
                cells = (f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80]}", "", "", "")
            rows.append((*head, kernel, run, *cells))
            print(*rows[-1], flush=True)
        if not has_gpu:
            rows.append((*head, "", "", "", "", "", ""))
    header = ("layers", "kept", "2:4", "kernel", "run", "dense ms", "sparse ms", "ratio", "error")
    table("All layers one after the other, fp16, best of several in turns", header, rows)


def as_called(function: Call) -> Call:
    return function


def recorded(function: Call) -> Call:
    """The same work, replayed from a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


RUNS: dict[str, Callable[[Call], Call]] = {"as called": as_called, "recorded": recorded}


def measure(
    layers: list[nn.Module], n_tokens: int, kernel: str, run: Callable[[Call], Call]
) -> tuple[str, str, str, str]:
    """Milliseconds of all layers dense and 2:4 sparse, how many times faster, and the largest relative error."""
    from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

    SparseSemiStructuredTensor._FORCE_CUTLASS = kernel == "CUTLASS"
    weights = [layer.weight.detach().to("cuda", torch.float16) for layer in layers]  # type: ignore[operator,union-attr]
    sparse = [to_sparse_semi_structured(weight) for weight in weights]
    inputs = [torch.randn(n_tokens, w.shape[1], dtype=torch.float16, device="cuda") for w in weights]
    error = 0.0
    for weight, packed, x in zip(weights, sparse, inputs):
        expected, found = nn.functional.linear(x, weight).float(), nn.functional.linear(x, packed).float()
        error = max(error, float((found - expected).abs().max() / expected.abs().max()))
    if not error < 1e-2:
        raise RuntimeError(f"off by {error:.1e}: not timed")
    dense_s, sparse_s = alternate(
        run(lambda: [nn.functional.linear(x, w) for x, w in zip(inputs, weights)]),
        run(lambda: [nn.functional.linear(x, w) for x, w in zip(inputs, sparse)]),
    )
    return f"{dense_s * 1e3:.3f}", f"{sparse_s * 1e3:.3f}", f"{dense_s / sparse_s:.2f}", f"{error:.0e}"


def alternate(*functions: Call) -> list[float]:
    """The best time of each, in seconds a call; they take turns."""
    best = [float("inf")] * len(functions)
    begun = time.perf_counter()
    for turn in range(REPEATS + 1):  # the first is to warm up
        for i, function in enumerate(functions):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(N_CALLS):
                function()
            torch.cuda.synchronize()
            if turn:
                best[i] = min(best[i], (time.perf_counter() - start) / N_CALLS)
        if turn and time.perf_counter() - begun > MOST_SECONDS:
            break
    return best


if __name__ == "__main__":
    main()
