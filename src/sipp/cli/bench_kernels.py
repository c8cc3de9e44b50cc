"""What `sipp bench` measures: kernels against torch's matmul, scoring against a forward pass.

Ratios of times measured in turns, in one run. What disagrees with the float64 reference is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import sipp
from sipp.cli.data_option import Source, check_fits, data_or_noise, draw, images_lines, open_source
from sipp.cli.errors import UNEXPECTED, CommandError, naming_option
from sipp.cli.model_option import find_device, load_model
from sipp.inputs.data import data_of
from sipp.scoring import kernels
from sipp.scoring.kernels import reference
from sipp.scoring.kernels.chunk_ratios import max_chunk

SHAPES = ((64, 576, 8192), (16, 27, 65536))  # rows, fan-in, patches: an inner and the first layer of a small ResNet
CHECKED_ROWS, CHECKED_PATCHES = 4, 512  # the float64 reference is slow
CHECKED_POINTS = 2
AGREEMENT = 1e-5  # relative, of float32 scores
N_POINTS = 32


def measure(
    model: str,
    weights: Path | None,
    data: str | None,
    normalise: str | None,
    size: int | None,
    device: str,
    repeats: int,
) -> tuple[str, list[dict[str, Any]], list[str]]:
    """The machine in words, a line for each shape of kernel and for the network, and how images became numbers."""
    spec = data_or_noise(data, model, N_POINTS, "sipp bench")
    where = find_device(device)
    lines = [_kernel_line(*shape, where, repeats) for shape in SHAPES]
    source = open_source(spec, "calibration", "--data", model=model, normalise=normalise, size=size)
    lines.append(_network_line(model, load_model(model, weights, device=device), source, repeats))
    machine = f"{where.type}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return machine, lines, images_lines(source)


def alternate(*functions: Callable[[], object], repeats: int) -> list[float]:
    """The best time of each in seconds; they take turns, so that a noisy moment meets all."""
    best = [float("inf")] * len(functions)
    for function in functions:
        function()
    for _ in range(repeats):
        for i, function in enumerate(functions):
            begun = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[i] = min(best[i], time.perf_counter() - begun)
    return best


def refuse_wrong(what: str, found: Tensor, expected: Tensor) -> float:
    """The largest relative difference; refuses to time what is not right."""
    expected = expected.double().cpu()
    gap = (found.double().cpu() - expected).abs() / expected.abs().clamp(min=torch.finfo(torch.float32).tiny)
    worst = float(gap.max())
    if not worst <= AGREEMENT:
        raise CommandError(
            f"{what} differs from the float64 reference by {worst:.1e}, more than {AGREEMENT:.0e}: not timed",
            where="sipp bench",
            fix="use kernel='reference' in Python, and report this machine",
            code=UNEXPECTED,
        )
    return worst


def _kernel_line(rows: int, fan_in: int, patches: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """The sensitivities of a layer of this shape against a float32 matmul of that shape."""
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(1, fan_in, patches, generator=generator).to(device)
    weight = torch.randn(1, rows, fan_in, generator=generator).to(device)
    fast = kernels.pick("auto", device)
    small = a[..., :CHECKED_PATCHES].contiguous(), weight[:, :CHECKED_ROWS].contiguous()
    off_by = refuse_wrong("the kernel", _ratios(fast, *small), _ratios(reference, *small))
    matmul, ours = alternate(lambda: weight[0] @ a[0], lambda: _ratios(fast, a, weight), repeats=repeats)
    return _line("kernel", f"{rows} x {fan_in} x {patches}", matmul, ours, off_by)


def _ratios(kernel: ModuleType, patches_GKP: Tensor, weight_GRK: Tensor) -> Tensor:
    """The largest ratio of each weight over non-negative patches, as scoring has it from this kernel."""
    row_factors_GR = torch.ones(weight_GRK.shape[:2], dtype=torch.float64, device=weight_GRK.device)
    if not kernel.FUSED:
        return max_chunk(kernel, patches_GKP, 1, weight_GRK, row_factors_GR, (True, False))[0]
    best_GRK: Tensor = kernel.max_ratios(
        patches_GKP.transpose(1, 2)[None],
        1,
        weight_GRK,
        factors_TB=torch.tensor([[1.0], [0.0]]),
        row_factors_GR=row_factors_GR,
        best_GRK=torch.zeros_like(weight_GRK),
    )[0]
    return best_GRK


def _network_line(model: str, network: nn.Module, source: Source, repeats: int) -> dict[str, Any]:
    """Scoring a network against its forward pass on the same points."""
    points = draw(source, N_POINTS, seed=0, batch_size=N_POINTS, model=network)
    few = draw(source, CHECKED_POINTS, seed=0, batch_size=CHECKED_POINTS, model=network)
    check_fits(network, points, model, "--data")
    with naming_option(f"--model {model}, --data {source.spec}", "see sipp bench --help"):
        fast = sipp.sensitivity(network, few.batches, progress=False)
        slow = sipp.sensitivity(network, few.batches, scoring=sipp.Scoring(kernel="reference"), progress=False)
        off_by = max(refuse_wrong(f"the score of {name}", fast[name], slow[name]) for name in fast)
    device = next(network.parameters()).device
    batch = next(iter(data_of(points.batches, device=device).batches()))

    def forward() -> None:
        with torch.no_grad():
            network(*batch.args, **batch.kwargs)

    passed, scored = alternate(
        forward, lambda: sipp.sensitivity(network, points.batches, progress=False), repeats=repeats
    )
    return _line(f"network {model}", f"{points.n_points} points", passed, scored, off_by)


def _line(what: str, size: str, matmul: float, ours: float, off_by: float) -> dict[str, Any]:
    times = {"torch_ms": 1e3 * matmul, "sipp_ms": 1e3 * ours, "ratio": ours / matmul}
    return {"what": what, "size": size, **times, "off_by": off_by}
