"""Whole pruned networks, sparse against dense, in one run: `python benchmarks/bench_runtime.py [name ...] [--busy]`.

Masks are those of `sipp.prune(method="magnitude")`, which leaves more to those layers of an untrained network that have
few weights; with --even every layer keeps the same share. Dense is the faster of torch in inference mode, in its better
memory format, and ONNX Runtime (`--onnx`, if it is installed). Runs take turns and the best of each counts. With
--busy: the CPU time of one thread, for a machine that others use too. With --write, the figures go to
`figures/runtime-cpu.json`, or `runtime-onnx.json`.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from common import alternate, clock_for, write_figures
from torch import Tensor, nn

import sipp
from sipp_lab.nets import build


class LastState(nn.Module):
    """A two-layer LSTM and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0][:, -1])


def mini_lm() -> nn.Module:
    """A transformer of MiniLM's shape: 6 layers of width 384, 12 heads."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    return BertModel(config, add_pooling_layer=False)


def mlp() -> nn.Module:
    sizes = (784, 1000, 1000, 10)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def small_cnn() -> nn.Module:
    """A CNN as a newcomer writes it."""
    widths = (3, 32, 64, 64, 128)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if i else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


# name: network, example, goals at 90 % and 95 % zeros
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[float | None, float]]] = {
    "resnet20": (lambda: build("resnet20"), lambda: torch.randn(64, 3, 32, 32), (2.5, 4.0)),
    "resnet18": (lambda: build("resnet18"), lambda: torch.randn(8, 3, 224, 224), (2.0, 3.0)),
    "vgg16": (lambda: build("vgg16"), lambda: torch.randn(64, 3, 32, 32), (None, 4.0)),
    "mini-lm": (mini_lm, lambda: torch.randint(0, 30522, (8, 128)), (2.0, 3.5)),
    "mlp": (mlp, lambda: torch.randn(1, 784), (None, 3.0)),
    "small-cnn": (small_cnn, lambda: torch.randn(64, 3, 32, 32), (3.0, 3.0)),
    "small-cnn-1": (small_cnn, lambda: torch.randn(1, 3, 32, 32), (1.3, 1.3)),
    "lstm": (LastState, lambda: torch.randn(1, 100, 40), (None, 2.0)),
}
SHORT = ("mlp", "small-cnn-1")  # calls of less than a millisecond
KEEPS = (1.0, 0.7, 0.5, 0.3, 0.1, 0.05)
WORK = (
    "whole networks, masks by magnitude, sipp.sparse against torch in inference mode in its better memory format, two "
    "threads, in turns; by per cent of zeros"
)


def onnx_runner(model: nn.Module, x: Tensor) -> Callable[[Tensor], object]:
    """The model in ONNX Runtime, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda given: session.run(None, {name: given.numpy()})


@torch.no_grad()
def evenly_pruned(model: nn.Module, keep: float) -> nn.Module:
    """The model, whose weights each keep this share: the largest."""
    for weight in model.parameters():
        if weight.ndim > 1:
            n_pruned = weight.numel() - round(keep * weight.numel())
            weight.view(-1)[weight.abs().flatten().argsort()[:n_pruned]] = 0
    return model


def bench(name: str, keep: float, is_busy: bool, with_onnx: bool, is_even: bool) -> float:
    make, example, goals = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that died
        pruned = evenly_pruned(model, keep) if is_even else sipp.prune(model, None, keep=keep, method="magnitude").model
    dense = pruned.eval()
    has_images = any(parameter.ndim == 4 for parameter in dense.parameters())
    last = copy.deepcopy(dense).to(memory_format=torch.channels_last) if has_images else dense
    x = example()
    x_last = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = sipp.sparse(dense, x)
    with torch.inference_mode():
        outputs = [_tensor(run) for run in (dense(x), fast(x))]
        error = float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max())
        if error > 1e-4:
            raise SystemExit(f"{name}: outputs differ by {error:.1e} of their size; nothing is timed")
        n_calls = (
            20 if len(x) == 1 and name != "lstm" else 1
        )  # short ones in a row: each finds its own weights in the cache
        runs = [
            lambda run=run, x=given: [run(x) for _ in range(n_calls)]
            for run, given in ((fast, x), (dense, x), (last, x_last))
        ]
        runs = runs[: 2 if last is dense else 3]
        if with_onnx:
            by_onnx = onnx_runner(dense, x)
            runs.append(lambda: [by_onnx(x) for _ in range(n_calls)])
        times = alternate(*runs, repeats=15, clock=clock_for(is_busy))
        sparse, *others = (seconds / n_calls for seconds in times)
    goal = {0.1: goals[0], 0.05: goals[1]}.get(keep)
    print(
        f"{name:9} zeros {1 - keep:4.0%}  dense {min(others) * 1e3:9.3f} ms  sparse {sparse * 1e3:9.3f} ms  "
        f"{min(others) / sparse:5.2f} x  goal {'' if goal is None else goal:4}  error {error:.0e}  "
        f"weights {fast.n_dense_bytes / 1e6:6.2f} -> {fast.n_bytes / 1e6:6.2f} MB  compiled in {fast.seconds:5.1f} s"
        f"{'  (dense)' if fast.latest.is_dense else ''}{f'  onnx {others[-1] * 1e3:9.3f} ms' if with_onnx else ''}",
        flush=True,
    )
    return min(others) / sparse


def _tensor(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output["last_hidden_state"]  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--busy", action="store_true", help="one thread, measured in CPU time")
    parser.add_argument("--onnx", action="store_true", help="time ONNX Runtime beside torch")
    parser.add_argument("--even", action="store_true", help="the same share of zeros in every layer")
    parser.add_argument("--write", action="store_true", help="write the figures of a quiet machine")
    options = parser.parse_args()
    names, is_busy = options.names or list(CASES), options.busy
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(CASES)}")
    clock_for(is_busy)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads{', CPU time' if is_busy else ''}")
    found = {
        name: {
            f"{100 * (1 - keep):.0f}": round(bench(name, keep, is_busy, options.onnx, options.even), 2)
            for keep in KEEPS
        }
        for name in names
    }
    if options.write:
        write_figures("runtime-onnx" if options.onnx else "runtime-cpu", WORK, found)


if __name__ == "__main__":
    main()
