"""Prints how accurate networks are that were sampled, for both forms of OptAlloc.

    python benchmarks/bench_allocation.py --data data --weights resnet20-cifar10.safetensors
    python benchmarks/bench_allocation.py --runs results --figure results/allocation/figures/forms.png

The first prunes a published ResNet20 without retraining: 256 training images score the weights, 2,000 test images
judge. The second reads the runs of a folder and draws them. Each writes its part of benchmarks/figures/allocation.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from common import write_figures

METHODS = ("sipp-rand", "sipp-hybrid")
FORMS = ("paper", "layers")
KEEPS = (0.8, 0.65, 0.5)
N_POINTS, N_TEST, N_SEEDS = 256, 2000, 5

Row = dict[str, Any]


def prune_published(data: Path, weights: Path) -> Row:
    """Top-1 of a published network after pruning alone, in per cent, for each method, form, keep and seed."""
    from published import accuracy, images_of, resnet

    import sipp

    images = images_of(data, 0)
    images = type(images)(images.train, images.test[:N_TEST], images.labels[:N_TEST])
    net = resnet(weights)
    rows: list[Row] = [{"method": "dense", "keep": 1.0, "top1": [round(accuracy(net, images), 2)]}]
    for method in METHODS:
        for allocation in reversed(FORMS):
            for keep in KEEPS:
                found = []
                for seed in range(N_SEEDS):
                    options = {"method": method, "allocation": allocation, "seed": seed, "progress": False}
                    pruned = sipp.prune(net, images.points(0, N_POINTS), keep=keep, **options)
                    found.append(round(accuracy(pruned.model, images), 2))
                rows.append({"method": method, "allocation": allocation, "keep": keep, "top1": found})
    shape = f"ResNet20, {N_POINTS} inputs to score, {N_TEST:,} test images, not retrained, {N_SEEDS} seeds"
    return {"shape": shape, "sipp": sipp.__version__, "rows": rows}


def read_runs(folder: Path) -> list[Row]:
    """Top-1 before and after training, in per cent, of every sampled network in the runs of a folder."""
    found: dict[tuple[Any, ...], Row] = {}
    for manifest in sorted(folder.rglob("manifest.json")):
        config = json.loads(manifest.read_text())["config"]
        allocation = config["prune"].get("allocation")  # older runs do not say: their code had other rules
        if allocation is None:
            continue
        net = str(config.get("code", {}).get("net") or config["net"]).rpartition(":")[
            2
        ]  # older runs have own code apart
        once = config["pipeline"] == "iterative" and len(config["prune"]["keeps"] or ()) == 1
        pipeline = "one cut" if once else config["pipeline"]
        init = config["init"] if pipeline == "at-init" else None
        for line in (manifest.parent / "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["method"] not in METHODS:
                continue
            keep = config["prune"]["keeps"][record["level"] - 1]
            key = (net, pipeline, init, record["method"], keep, allocation)
            names = ("network", "pipeline", "init", "method", "keep", "allocation")
            row = found.setdefault(key, {**dict(zip(names, key)), "before": [], "after": []})
            row["before"].append(round(100 * record["before"]["top1"], 2))
            row["after"].append(round(100 * record["after"]["top1"], 2))
    return list(found.values())


def print_published(part: Row) -> None:
    print("| method | allocation | keep | top-1, mean | lowest to highest |\n|---|---|---|---|---|")
    for row in part["rows"]:
        top1 = row["top1"]
        named = f"{row['method']} | {row.get('allocation', '')} | {row['keep']:g}"
        print(f"| {named} | {statistics.mean(top1):.1f} | {min(top1):.1f} to {max(top1):.1f} |")


def print_runs(rows: list[Row]) -> None:
    """A line for each network, pipeline and keep that was run in both forms: the printed one -> the authors'."""
    found = {(*_place(row), row["method"], row["allocation"]): row for row in rows}
    cells = [(method, when) for method in METHODS for when in ("before", "after")]
    heads = [f"{method}, {when} training" for method, when in cells]
    print(f"| network | pipeline | keep | seeds | {' | '.join(heads)} |")
    print("|---" * (4 + len(cells)) + "|")
    for place in dict.fromkeys(_place(row) for row in rows):
        if not all((*place, method, form) in found for method in METHODS for form in FORMS):
            continue
        network, pipeline, init, keep = place
        said = []
        for method, when in cells:
            pair = [found[(*place, method, form)][when] for form in FORMS]
            said.append("" if init and when == "before" else " → ".join(map(_spread, pair)))  # untrained: chance
        n_seeds = min(len(found[(*place, method, form)]["after"]) for method in METHODS for form in FORMS)
        named = f"{pipeline}, {init}" if init else pipeline
        print(f"| {network} | {named} | {100 * keep:g} % | {n_seeds} | {' | '.join(said)} |")


def draw_runs(rows: list[Row], path: Path) -> None:
    """A panel for each network and pipeline with several keeps in both forms: top-1 after training."""
    import matplotlib.pyplot as plt

    panels: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        panels.setdefault(_place(row)[:3], []).append(row)
    keeps_of = {
        place: {form: {r["keep"] for r in those if r["allocation"] == form} for form in FORMS}
        for place, those in panels.items()
    }
    whole = {place: panels[place] for place, forms in keeps_of.items() if min(map(len, forms.values())) > 1}
    figure, axes = plt.subplots(1, len(whole), figsize=(3.4 * len(whole), 3.2), squeeze=False, layout="constrained")
    for axis, ((network, pipeline, init), those) in zip(axes[0], whole.items()):
        for method, colour in zip(METHODS, ("#0b8a5f", "#0b5cad")):
            for form, line, words in zip(FORMS, ("--", "-"), ("as printed", "as the authors ran it")):
                curve = [row for row in those if (row["method"], row["allocation"]) == (method, form)]
                curve.sort(key=lambda row: -row["keep"])
                keeps, means = [row["keep"] for row in curve], [statistics.mean(row["after"]) for row in curve]
                axis.plot(keeps, means, line, color=colour, marker="o", markersize=3, label=f"{method}, {words}")
        axis.set(xscale="log", title=f"{network}, {pipeline}{f', {init}' if init else ''}", xlabel="keep (%)")
        axis.set_xticks(keeps, [f"{100 * keep:g}" for keep in keeps])
        axis.minorticks_off()
        axis.invert_xaxis()
    axes[0][0].set_ylabel("top-1 after training (%)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("network", "pipeline", "init", "keep"))


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with cifar-10-batches-bin")
    parser.add_argument("--weights", type=Path, help="resnet20-cifar10.safetensors")
    parser.add_argument("--runs", type=Path, help="folder with runs, such as results")
    parser.add_argument("--figure", type=Path, help="with --runs: the picture to write")
    wanted = parser.parse_args()
    if (wanted.weights is None) == (wanted.runs is None):
        parser.error("give --weights or --runs")
    if wanted.runs is None:
        published = prune_published(wanted.data, wanted.weights)
        print_published(published)
        values: dict[str, Any] = {"published": published}
    else:
        runs = read_runs(wanted.runs)
        print_runs(runs)
        if wanted.figure is not None:
            draw_runs(runs, wanted.figure)
        values = {"runs": runs}
    write_figures("allocation", "networks that were sampled, in both forms of OptAlloc: top-1 in per cent", values)


if __name__ == "__main__":
    main()
