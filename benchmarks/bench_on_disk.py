"""A model larger than memory passes through `sipp.prune_on_disk`: 2 GB of random weights in a process of 1.2 GB.

    python benchmarks/bench_on_disk.py WORK [--blocks 40] [--megabytes 1200] [--repair]

Needs transformers and accelerate, and three times the weights on disk. The run is killed twice (SIGKILL) and started
again; a second one is left alone. Prints the peak of resident memory of each process and whether the bits are the same.
Memory is limited by RLIMIT_DATA: what a process may write to, without the code and files that are mapped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from common import write_figures

WIDTH, INNER, VOCABULARY = 1024, 2816, 2000


def config(n_blocks: int) -> object:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=n_blocks,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=True,
        use_cache=False,
    )


def empty_model(n_blocks: int):
    from accelerate import init_empty_weights
    from transformers import LlamaForCausalLM

    with init_empty_weights():
        return LlamaForCausalLM(config(n_blocks)).eval()


def make(folder: Path, n_blocks: int) -> int:
    """Writes random weights, a file a block, and gives their number of bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: p.shape for name, p in empty_model(n_blocks).named_parameters()}
    file_of, n_bytes = {}, 0
    generator = torch.Generator().manual_seed(0)
    by_file: dict[str, list[str]] = {}
    for name in shapes:
        part = name.split(".")[2] if ".layers." in name else "rest"
        file_of[name] = f"model-{part}.safetensors"
        by_file.setdefault(file_of[name], []).append(name)
    for file, names in by_file.items():
        tensors = {
            name: torch.ones(shapes[name])
            if len(shapes[name]) == 1
            else torch.randn(shapes[name], generator=generator) / 32
            for name in names
        }
        n_bytes += sum(tensor.numel() * 4 for tensor in tensors.values())
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return n_bytes


def child(source: Path, out: Path, n_blocks: int, megabytes: int, repair: bool) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))
    import torch

    import sipp

    torch.set_num_threads(1)
    ids = torch.randint(0, VOCABULARY, (12, 64), generator=torch.Generator().manual_seed(1))
    model = empty_model(n_blocks)
    sipp.prune_on_disk(model, source, list(ids.split(6)), out, keep=0.5, repair=repair, progress=False)
    print(f"peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB", flush=True)


def run(arguments: list[str], journal: Path, kill_at: int | None) -> tuple[int, str]:
    """Runs this file as a child; kills it when so many blocks are finished. Its exit code, and what it printed."""
    started = subprocess.Popen(
        [sys.executable, __file__, *arguments, "--child"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072"},
    )
    while started.poll() is None:
        if kill_at is not None and journal.is_file():
            try:
                finished = json.loads(journal.read_text())["finished"]
            except (ValueError, OSError):
                finished = 0
            if finished >= kill_at:
                started.send_signal(signal.SIGKILL)
        time.sleep(0.05)
    return started.returncode, started.stdout.read() if started.stdout is not None else ""


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        found.update(path.name.encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--repair", action="store_true")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the peak memory to figures/on-disk.json")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    source = given.work / "dense"
    if given.child:
        child(source, given.out, given.blocks, given.megabytes, given.repair)
        return
    n_bytes = make(source, given.blocks)
    print(f"{n_bytes / 1e9:.2f} GB of weights in {given.blocks} blocks, {given.megabytes} MB of memory", flush=True)
    options = [str(given.work), "--blocks", str(given.blocks), "--megabytes", str(given.megabytes)]
    options += ["--repair"] * given.repair
    digests, peaks = [], []
    for name, kills in (("killed", (given.blocks // 4, given.blocks // 2)), ("undisturbed", ())):
        out, start = given.work / name, time.time()
        shutil.rmtree(out, ignore_errors=True)
        for kill_at in (*kills, None):
            code, told = run([*options, "--out", str(out)], out / "progress.json", kill_at)
            peaks += [int(found) for found in re.findall(r"peak resident (\d+) MB", told)]
            print(f"{name}: exit {code}" + (f", killed behind block {kill_at}" if kill_at else ""), flush=True)
            if code != (-signal.SIGKILL if kill_at else 0):  # two runs that failed have the same bits too: none
                raise SystemExit(f"{name}: it ended by itself with {code}")
        digests.append(digest(out))
        print(f"{name}: {time.time() - start:.0f} s, {digests[-1]}", flush=True)
    print("same bits" if digests[0] == digests[1] else "DIFFERENT", f"peak resident {max(peaks)} MB", flush=True)
    if given.write:
        work = f"a Llama of {given.blocks} blocks with random weights, killed twice, {given.megabytes} MB allowed"
        write_figures("on-disk", work, {"large": {"GB": round(n_bytes / 1e9, 2), "peak_MB": max(peaks)}})


if __name__ == "__main__":
    main()
