"""Prints what each of the CPU engine's own kernels is worth: a network that uses it, with the kernel and without it.

    python benchmarks/bench_engine_parts.py [part ...]

A part that is left out is run by torch (or by the more general kernel). Times are the CPU time of one thread, best of
twelve in turns. A part that gains less than 5 % on every network here is one to delete. Writes
`figures/engine-parts.json`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from bench_runtime import LastState, mini_lm, mlp, small_cnn
from common import alternate, write_figures
from torch import Tensor, nn

import sipp
from sipp.runtime import buffers, cpu_network, graph, images as pooling, plan, products, steps
from sipp_lab.nets import build


def without_strides(op: graph.Op, work: buffers.Work) -> steps.Step | None:
    """A convolution without the layout that lets few images be read at a stride."""
    stride = products.pair(op.args[3]) if len(op.args) > 3 else (1, 1)
    return None if stride[1] > 1 else products.product_step(op, work)


# part: where the engine looks it up, under which names, and what stands there without it
PARTS: dict[str, tuple[Any, tuple[Any, ...], Any]] = {
    "attention": (plan.MAKERS, (graph.ATTENTION,), lambda *_: None),
    "norms": (plan.MAKERS, (graph.ATEN.layer_norm.default,), lambda *_: None),
    "maxima": (plan.MAKERS, (pooling.MAX,), lambda *_: None),
    "means": (plan.MAKERS, pooling.MEANS, lambda *_: None),
    "cat": (plan.MAKERS, (pooling.CAT,), lambda *_: None),
    "pad": (plan.MAKERS, (pooling.PAD,), lambda *_: None),
    "strides": (plan.MAKERS, (graph.CONV,), without_strides),
    "lstm": (plan.MAKERS, (graph.LSTM,), lambda *_: None),
    "one vector": (vars(products), ("_vector_step",), products._strip_step),
    "rounds": (vars(products), ("_rounds",), lambda *_: [1]),
    "chunks": (vars(cpu_network), ("chunk_size",), lambda *_: None),
    "sums and activations in products": (vars(graph), ("_fuse_sum", "activation_of"), lambda *_: None),
    "norms folded into products": (vars(graph), ("_can_fold",), lambda *_: False),  # else products of their own
    "norms as products": (vars(graph), ("_fold_batch_norm",), lambda *_: None),
}


def images(n: int, side: int = 32) -> Tensor:
    return torch.randn(n, 3, side, side)


def network(make: Callable[[], nn.Module], keep: float) -> nn.Module:
    """The network pruned, untrained."""
    torch.manual_seed(0)
    return sipp.prune(make().eval(), None, keep=keep, method="magnitude", progress=False).model.eval()


Case = tuple[str, str, Callable[[], nn.Module], Callable[[], Tensor]]
CASES: list[Case] = [
    ("attention", "MiniLM, 8 x 128 tokens", lambda: network(mini_lm, 0.1), lambda: torch.randint(0, 30522, (8, 128))),
    ("norms", "MiniLM, 8 x 128 tokens", lambda: network(mini_lm, 0.1), lambda: torch.randint(0, 30522, (8, 128))),
    ("maxima", "CNN5, 64 images", lambda: network(lambda: build("cnn5"), 0.1), lambda: images(64)),
    ("maxima", "small CNN, one image", lambda: network(small_cnn, 0.1), lambda: images(1)),
    ("means", "DenseNet22, 64 images", lambda: network(lambda: build("densenet22"), 0.1), lambda: images(64)),
    ("cat", "DenseNet22, 64 images", lambda: network(lambda: build("densenet22"), 0.1), lambda: images(64)),
    ("pad", "ResNet20, 64 images", lambda: network(lambda: build("resnet20"), 0.1), lambda: images(64)),
    ("strides", "ResNet20, one image", lambda: network(lambda: build("resnet20"), 0.1), lambda: images(1)),
    ("lstm", "LSTM 40-256-256, 100 steps", lambda: network(LastState, 0.1), lambda: torch.randn(1, 100, 40)),
    ("one vector", "MLP 784-1000-1000-10, one input", lambda: network(mlp, 0.1), lambda: torch.randn(1, 784)),
    ("rounds", "VGG16, 64 images", lambda: network(lambda: build("vgg16"), 0.1), lambda: images(64)),
    ("chunks", "ResNet20, 64 images", lambda: network(lambda: build("resnet20"), 0.1), lambda: images(64)),
    ("chunks", "ResNet20, 256 images", lambda: network(lambda: build("resnet20"), 0.1), lambda: images(256)),
    *(
        (part, f"ResNet20, {words}", lambda: network(lambda: build("resnet20"), 0.1), lambda n=n: images(n))
        for part in ("sums and activations in products", "norms folded into products", "norms as products")
        for n, words in ((1, "one image"), (64, "64 images"))
    ),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all if none is given")
    wanted = parser.parse_args().parts or list(PARTS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    values: dict[str, dict[str, float]] = {}
    print("| part | network | with, ms | without, ms | ratio |\n|---|---|---|---|---|")
    for part, name, make, example in CASES:
        if part not in wanted:
            continue
        dense, x = make(), example()
        fast = sipp.sparse(dense, x)
        table, names, instead = PARTS[part]
        with mock.patch.dict(table, dict.fromkeys(names, instead)):
            plain = sipp.sparse(dense, x)
        with torch.inference_mode():
            runs = (lambda fast=fast, x=x: fast(x), lambda plain=plain, x=x: plain(x))
            seconds = alternate(*runs, repeats=12, clock=time.process_time)
        ratio = seconds[1] / seconds[0]
        print(f"| {part} | {name} | {seconds[0] * 1e3:.2f} | {seconds[1] * 1e3:.2f} | {ratio:.2f} |", flush=True)
        values.setdefault(part, {})[name] = round(ratio, 2)
    write_figures("engine-parts", "time without the part by time with it, one thread, CPU time, keep 0.1", values)


if __name__ == "__main__":
    main()
