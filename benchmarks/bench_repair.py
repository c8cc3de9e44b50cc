"""Prints what `sipp.repair` brings back on published CIFAR-10 ResNets, and on a sentence transformer.

    python benchmarks/bench_repair.py --weights resnet20-cifar10.safetensors --data data/
    python benchmarks/bench_repair.py --weights resnet56-cifar10.safetensors --data data/ --steps 100
    python benchmarks/bench_repair.py --encoder all-MiniLM-L6-v2/

The ResNets: masks by `wt`, unlabelled training images for the repair, all 10,000 test images for the accuracy. The
encoder: a folder with a BERT model and its tokenizer; sentences made here, some for the repair, others for the table.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from pathlib import Path

import torch
from common import table
from safetensors.torch import load_file
from torch import Tensor, nn

import sipp
from sipp.experiments.data import load_cifar10, normalise
from sipp.experiments.nets import build

N_TEST = 10_000
BATCH = 500


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right answers, in per cent."""
    net.eval()
    with torch.no_grad():
        n_right = sum(int((net(x).argmax(1) == y).sum()) for x, y in zip(images.split(BATCH), labels.split(BATCH)))
    return 100 * n_right / len(labels)


def images_table(options: argparse.Namespace) -> None:
    """Prints one line a keep: accuracy of the pruned and the repaired network, and what the repair took."""
    data = load_cifar10(options.data)
    images = normalise(data.images[data.n_train :]), data.labels[data.n_train :]
    generator = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(data.n_train, generator=generator)[: options.points]
    points = normalise(data.images[chosen])
    net = build(options.weights.name.split("-")[0], n_classes=10)
    net.load_state_dict(load_file(options.weights))
    net.eval()
    lines = [["dense", "", f"{accuracy(net, *images):.2f}", "", "", ""]]
    for keep in options.keep:
        pruned = sipp.prune(net, None, keep=keep, method="wt")
        start, cpu = time.perf_counter(), time.process_time()
        fixed = sipp.repair(net, pruned, points, steps=options.steps, learning_rate=options.learning_rate)
        took = f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s CPU"
        if options.show:
            print(fixed.repair)
        assert fixed.repair is not None
        errors = (fixed.repair.output_before, fixed.repair.output_refit, fixed.repair.output_after)
        raw, new = accuracy(pruned.model, *images), accuracy(fixed.model, *images)
        steps = "" if fixed.repair.polish is None else f"{fixed.repair.polish.best} of {fixed.repair.polish.taken}"
        shown = " / ".join(f"{e:.3f}" for e in errors if e is not None)
        lines.append([f"{keep:g}", f"{raw:.2f}", f"{new:.2f}", shown, steps, took])
        print(lines[-1], flush=True)
    table("repair", ["keep", "pruned", "repaired", "output error: pruned / refit / after", "best step", "time"], lines)


class Encoder(nn.Module):
    """A sentence's vector: the mean of the last layer over its real positions."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


WHO = (
    "my neighbour", "a tired engineer", "the city council", "an old sailor", "the new librarian", "her younger brother",
    "the striking miners", "a retired judge", "the night nurse", "our chemistry teacher", "the football coach",
    "a lost tourist",
)  # fmt: skip
DOES = (
    "repaired the bicycle", "wrote a long letter about taxes", "forgot the password of the server",
    "planted tomatoes and beans",
    "lost the final in the last minute", "discovered a leak in the cooling system", "sold the house below its value",
    "cooked soup for forty guests", "measured the rainfall every morning", "refused to sign the contract",
    "borrowed a violin from the museum", "argued that interest rates must fall", "translated the poem into Finnish",
)  # fmt: skip
WHEN = (
    "during the storm", "before the election", "although nobody had asked", "because the train was late",
    "in early spring",
    "while the children slept", "after two years of silence", "despite the warning of the doctor",
    "with surprising ease",
    "on the way to the airport", "when the market crashed",
)  # fmt: skip
FORMS = (
    "{who} {does} {when}.", "{when}, {who} {does}.", "Is it true that {who} {does}?",
    "They say {who} {does} {when}, and I believe it.",
    "{who} {does}", "Nobody knows why {who} {does} {when}; the newspaper printed three different stories about it.",
)  # fmt: skip


def sentences(n: int, seed: int) -> list[str]:
    """Different made-up sentences in a random order."""
    every = [
        form.format(who=who, does=does, when=when).capitalize()
        for form, who, does, when in itertools.product(FORMS, WHO, DOES, WHEN)
    ]
    unique = sorted(set(every))
    order = torch.randperm(len(unique), generator=torch.Generator().manual_seed(seed))
    return [unique[i] for i in order[:n].tolist()]


def encoder_table(options: argparse.Namespace) -> None:
    """Prints how far 95 % of the sentence vectors move at most, pruned and repaired, and what the repair took."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.encoder)
    net = Encoder(AutoModel.from_pretrained(options.encoder)).eval()
    texts = sentences(options.points + 400, options.seed)
    batches = [dict(tokenizer(texts[i : i + 32], padding=True, return_tensors="pt")) for i in range(0, len(texts), 32)]
    kept_names = ("input_ids", "attention_mask")
    batches = [{name: batch[name] for name in kept_names} for batch in batches]
    n_batches = options.points // 32
    data, new = batches[:n_batches], batches[n_batches:]

    def moved(other: nn.Module) -> float:
        with torch.no_grad():
            pairs = [(net(**batch), other(**batch)) for batch in new]
        ratios = torch.cat([(b - a).norm(dim=1) / a.norm(dim=1) for a, b in pairs])
        return float(ratios.quantile(0.95))

    lines = []
    for keep in options.keep:
        needed = None if options.method == "wt" else data  # scores of no use to `wt` would take most of the time
        pruned = sipp.prune(net, needed, keep=keep, method=options.method)
        start, cpu = time.perf_counter(), time.process_time()
        fixed = sipp.repair(net, pruned, data, steps=options.steps, learning_rate=options.learning_rate)
        took = f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s CPU"
        if options.show:
            print(fixed.repair)
        lines.append([f"{keep:g}", options.method, f"{moved(pruned.model):.3f}", f"{moved(fixed.model):.3f}", took])
        print(lines[-1], flush=True)
    table("95 % of sentence vectors move less than", ["keep", "mask", "pruned", "repaired", "time"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--method", default="wt")
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.4, 0.3, 0.2, 0.1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what was done to each layer")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.weights:
        images_table(options)
    if options.encoder:
        encoder_table(options)


if __name__ == "__main__":
    main()
