"""ONNX files of a pruned ResNet20, with its zeros and without: `python benchmarks/bench_export.py`.

Masks are those of `sipp.prune(method="magnitude")`. ONNX Runtime runs both on 64 images, in turns, on one thread, whose
CPU time counts. Writes `figures/onnx.json`.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import onnxruntime
import torch
from common import alternate, clock_for, write_figures

import sipp
from sipp_lab.nets import build

KEEP, N_IMAGES = 0.1, 64


def main() -> None:
    warnings.simplefilter("ignore")
    clock = clock_for(busy=True)
    torch.manual_seed(0)
    pruned = sipp.prune(build("resnet20").eval(), None, keep=KEEP, method="magnitude", progress=False)
    x = torch.randn(N_IMAGES, 3, 32, 32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sizes, sessions = [], []
    with tempfile.TemporaryDirectory() as folder:
        for is_sparse in (False, True):
            made = sipp.export(pruned, Path(folder) / f"{is_sparse}.onnx", x, sparse=is_sparse)
            sizes.append(made.n_bytes)
            sessions.append(onnxruntime.InferenceSession(made.path, options, providers=["CPUExecutionProvider"]))
    name = sessions[0].get_inputs()[0].name
    calls = [lambda session=session: session.run(None, {name: x.numpy()}) for session in sessions]
    seconds = alternate(*calls, repeats=25, clock=clock)
    values = {
        way: {"bytes": n_bytes, "ms": round(1e3 * taken, 1)}
        for way, n_bytes, taken in zip(("with zeros", "without zeros"), sizes, seconds)
    }
    print(values)
    work = f"ResNet20, keep {KEEP}: bytes of the ONNX file, and ms of ONNX Runtime for {N_IMAGES} images, one thread"
    write_figures("onnx", work, values)


if __name__ == "__main__":
    main()
