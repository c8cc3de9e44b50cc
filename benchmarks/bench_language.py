"""Perplexity of a pruned language model by five methods at several keeps, one table.

    python benchmarks/bench_language.py --model smollm2 --calibration valid.txt --test test.txt --json table.json
    python benchmarks/bench_language.py --model smollm2 --calibration bible.txt --test test.txt --device cuda
    python benchmarks/bench_language.py --model smollm2 --calibration valid.txt --test test.txt --independent

`--model` is a folder of Hugging Face. Calibration: so many sequences, drawn with the seed, none across two documents.
The test text is read as one and cut into windows that do not overlap, as the field does; the first `--windows` of them
and all. Every linear layer of the blocks is pruned, embeddings and head stay. magnitude: the largest of each layer, as
in papers on language models. ours: mask and weights found together (`repair=True`), from Wanda's mask. `--independent`
adds Wanda and SparseGPT in plain torch (language_peers.py). Rows are printed as they come, and written to --json.
`--split` adds a line to each: which part took how many seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from language_peers import pruned_by
from repair_split import splitting
from torch import Tensor, nn

import sipp
from sipp.inputs.capture import copy_of
from sipp.inputs.data import data_of
from sipp.repairing import repair_network, split_data
from sipp.results.numerics import device_of
from sipp.results.options import Pattern, RepairMethod

METHODS = ("magnitude", "wanda", "sparsegpt", "alps", "ours")
KEEPS = ("0.7", "0.5", "0.4", "0.3", "2:4", "4:8")


def goal(keep: str) -> dict[str, Any]:
    """The option of `prune` that a keep or a pattern is."""
    return {"pattern": keep} if ":" in keep else {"keep": float(keep)}


def magnitude(model: nn.Module, data: Tensor, keep: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The largest of each layer, or of each group."""
    found = sipp.prune(model, None, method="magnitude", progress=False, **goal(keep))
    if ":" in keep:
        return found.model, found.masks
    made, masks = copy_of(model), dict[str, Tensor]()
    with torch.no_grad():
        for name in found.masks:
            weight = made.get_parameter(name)
            n_kept = round(float(keep) * weight.numel())
            at = weight.abs().flatten().topk(n_kept).indices
            masks[name] = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device).index_fill(0, at, True)
            masks[name] = masks[name].view_as(weight)
            weight.mul_(masks[name])
    return made, masks


def by_peer(method: RepairMethod, model: nn.Module, data: Tensor, keep: str) -> nn.Module:
    """SparseGPT or ALPS as the package has them, every layer with its even share."""
    masks = magnitude(model, data, keep)[1]
    parts = split_data(data_of(data, device=device_of(model)))
    pattern = Pattern.of(keep) if ":" in keep else None
    return repair_network(model, masks, parts, method, pattern=pattern).model


def by_sipp(method: str, repair: bool, model: nn.Module, data: Tensor, keep: str) -> nn.Module:
    options: dict[str, Any] = {"statements": False, "progress": False, **goal(keep)}
    return sipp.prune(model, data, method=method, repair=repair, **options).model


def ways(methods: list[str], independent: bool) -> dict[str, Callable[[nn.Module, Tensor, str], nn.Module]]:
    """The network that each method makes of a dense one, calibration sequences and a keep."""
    known: dict[str, Callable[[nn.Module, Tensor, str], nn.Module]] = {
        "magnitude": lambda model, data, keep: magnitude(model, data, keep)[0],
        "wanda": partial(by_sipp, "wanda", False),
        "sparsegpt": partial(by_peer, "sparsegpt"),
        "alps": partial(by_peer, "alps"),
        "ours": partial(by_sipp, "wanda", True),
    }
    found = {name: known[name] for name in methods}
    for name in ("wanda", "sparsegpt") if independent else ():
        found[f"{name}, plain torch"] = partial(plainly, name)
    return found


def plainly(name: Any, model: nn.Module, data: Tensor, keep: str) -> nn.Module:
    return pruned_by(name, model, data, keep if ":" in keep else float(keep))


def measured(model: nn.Module, windows: Tensor, n_first: int, dense: nn.Module | None = None) -> dict[str, float]:
    """Perplexity over the first windows and over all; KL and equal next tokens over the first."""
    first = sipp.perplexity(model, windows[:n_first], dense=dense, progress=False)
    found = {"first": first.perplexity, "all": first.perplexity}
    if dense is not None:
        found |= {"kl": first.kl or 0.0, "same_token": first.same_token or 0.0}
    if len(windows) > n_first:
        rest = sipp.perplexity(model, windows[n_first:], progress=False)
        n = first.n_tokens + rest.n_tokens
        found["all"] = math.exp((first.loss * first.n_tokens + rest.loss * rest.n_tokens) / n)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=40, help="of the test text, for the first column")
    parser.add_argument("--most-windows", type=int, help="for the second; default: all")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--keeps", nargs="+", default=list(KEEPS))
    parser.add_argument("--independent", action="store_true")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    read = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    model = read.to(options.device).eval()
    drawn = {"length": options.length, "n_sequences": options.sequences, "seed": options.seed}
    data = sipp.text(options.calibration, tokenizer, **drawn)
    windows = sipp.text(options.test, tokenizer, length=options.length, apart=False)[: options.most_windows]
    dense = measured(model, windows, options.windows)
    told = f"{options.model.name}, calibrated on {len(data)} x {options.length} tokens of {options.calibration.name}"
    print(f"{told}; test {options.test.name}: first {min(options.windows, len(windows))}, all {len(windows)} windows")
    print(f"dense: {dense['first']:.2f}, {dense['all']:.2f}", flush=True)
    about = {name: str(value) for name, value in vars(options).items()} | {"n_windows": len(windows)}
    rows: list[dict[str, Any]] = [{"method": "dense", "keep": "1", **dense}]
    print("keep  method                  first      all     KL  same token  seconds  GiB", flush=True)
    for keep in options.keeps:
        for name, way in ways(options.methods, options.independent).items():
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            with splitting(options.device) if options.split else nullcontext() as split:
                pruned = way(model, data, keep)
            if options.device == "cuda":
                torch.cuda.synchronize()
            row = {"method": name, "keep": keep, "seconds": time.perf_counter() - begun}
            row["gib"] = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else math.nan
            row |= measured(pruned, windows, options.windows, model)
            rows.append(row)
            print(
                f"{keep:<5} {name:<22} {row['first']:>7.2f}  {row['all']:>7.2f}  {row['kl']:>5.3f}  "
                f"{row['same_token']:>9.1%}  {row['seconds']:>7.1f}  {row['gib']:.1f}",
                flush=True,
            )
            if split is not None:
                print(f"      {split}", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1).replace("NaN", "null"))


if __name__ == "__main__":
    main()
