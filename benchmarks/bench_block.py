"""Seconds and memory that a block of a large language model takes on a GPU: by Wanda, sipp-det and the joint search.

    python benchmarks/bench_block.py --width 4096 --inner 11008 --heads 32 --of 32 --device cuda

Blocks of Llama's shape with random weights in bfloat16, random tokens. Two depths are run: the seconds between them are
those of the blocks, without embedding, head and first calls. `--of` blocks make a model. Keep 0.5.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from common import table, write_figures

import sipp

WAYS = {
    "wanda": {"method": "wanda"},
    "sipp-det": {"method": "sipp-det"},
    "joint": {"method": "wanda", "repair": True},
}


def network(options: argparse.Namespace, n_blocks: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=n_blocks,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=options.length,
        use_cache=False,
    )
    with torch.device(options.device):
        return LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()


def run(options: argparse.Namespace, n_blocks: int, way: str) -> tuple[float, float]:
    """Seconds, and GiB at the peak beyond the weights."""
    net = network(options, n_blocks)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (options.sequences, options.length), generator=generator).to(options.device)
    data = [{"input_ids": part} for part in tokens.split(options.batch)]
    is_cuda = options.device == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    sipp.prune(net, data, keep=0.5, statements=False, progress=False, **WAYS[way])
    if is_cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - begun
    return took, torch.cuda.max_memory_allocated() / 2**30 if is_cuda else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--of", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--depths", type=int, nargs=2, default=[2, 3])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true", help="write figures/block-h200.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    small = argparse.Namespace(
        **vars(options) | {"width": 256, "inner": 512, "heads": 4, "sequences": 16, "length": 64}
    )
    lines = []
    found: dict[str, dict[str, float]] = {}
    for way in options.ways:
        run(small, 2, way)  # what is compiled and loaded once
        (few, _), (more, gib) = (run(options, n, way) for n in options.depths)
        a_block = (more - few) / (options.depths[1] - options.depths[0])
        lines.append(
            [way, f"{few:.1f}", f"{more:.1f}", f"{a_block:.1f}", f"{a_block * options.of / 60:.1f}", f"{gib:.1f}"]
        )
        print(lines[-1], flush=True)
        found[way] = {
            "seconds": round(a_block, 1),
            "minutes": round(a_block * options.of / 60, 1),
            "GiB": round(gib, 1),
        }
    title = f"{options.width} x {options.inner}, {options.sequences} x {options.length} tokens, {options.dtype}"
    depths = [f"{n} blocks, s" for n in options.depths]
    table(title, ["", *depths, "a block, s", f"{options.of} blocks, min", "GiB at the peak"], lines)
    if options.write:
        write_figures("block-h200", f"a block, random weights, {title}", found)


if __name__ == "__main__":
    main()
