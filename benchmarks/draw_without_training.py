"""Draws README's picture, `docs/without-training.png`, from the figures in `results/without-training.json`.

    python benchmarks/draw_without_training.py [JSON] [PNG]

The file holds, for "resnet20" (accuracy in percent) and "smollm2" (perplexity): "dense", "x" (shares of weights kept)
and "lines" ({method: one number for each share, or null where it was not measured}).
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parent.parent
SIZE, DPI = (7.2, 3.3), 200  # README shows it 700 pixels wide: letters of 9 points are 12 pixels there
OURS = ("#0b5fa5", "#5aa9e6")
OTHERS = {"SparseGPT": "#444444", "magnitude": "#8a6d3b", "Wanda": "#b0413e", "ALPS": "#7a7a7a"}
INK, GRID = "#222222", "#e6e6e6"
LABEL_GAP = 0.068  # of the height of a panel, between two names beside their lines


def spread(heights: list[float], gap: float) -> list[float]:
    """The heights, moved apart as little as needed for every two neighbours to be `gap` apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[tuple[list[int], float]] = []  # members from below, and where the lowest of them goes
    for i in order:
        members, low = [i], heights[i]
        while groups and groups[-1][1] + len(groups[-1][0]) * gap > low:
            below, _ = groups.pop()
            members = below + members
            middle = sum(heights[k] - place * gap for place, k in enumerate(members)) / len(members)
            low = middle
        groups.append((members, low))
    placed = {k: low + place * gap for members, low in groups for place, k in enumerate(members)}
    return [placed[i] for i in range(len(heights))]


def colours(names: list[str]) -> dict[str, str]:
    """Blue for our own lines, which are named sipp; quiet colours for the others."""
    return dict(zip((name for name in names if name.startswith("sipp")), OURS)) | OTHERS


def panel(ax: Axes, figures: dict, title: str, dense: str) -> None:
    """One network: a line for each method, its name at the sparse end, and the dense network as a dotted line."""
    x, lines = figures["x"], figures["lines"]
    colour = colours(list(lines)) | {dense: INK}
    ends = {dense: (min(x), figures["dense"])}
    for name, values in lines.items():
        points = sorted(((a, b) for a, b in zip(x, values) if b is not None), reverse=True)
        is_ours = name.startswith("sipp")
        ax.plot(*zip(*points), color=colour[name], lw=2.4 if is_ours else 1.4, marker="o", ms=3.5, zorder=3 + is_ours)
        ends[name] = points[-1]
    ax.axhline(figures["dense"], color=INK, lw=1, ls=":", zorder=2)
    margin = 0.03 * (max(x) - min(x))
    ax.set_xlim(max(x) + margin, min(x) - margin)
    ax.set_xticks(x, [f"{100 * share:g}" for share in x])
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_xlabel("weights kept (%)")
    ax.grid(axis="y", color=GRID)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, labelsize=9)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    to_height = ax.transData + ax.transAxes.inverted()
    heights = spread([to_height.transform(end)[1] for end in ends.values()], LABEL_GAP)
    for (name, (share, _)), height in zip(ends.items(), heights):
        left = to_height.transform((share, figures["dense"]))[0] + 0.03
        look = {"color": colour[name], "weight": "bold" if name.startswith("sipp") else "normal"}
        ax.text(left, height, name, transform=ax.transAxes, fontsize=9, va="center", **look)


def draw(figures: dict, path: Path) -> None:
    """Both panels, side by side."""
    plt.rcParams |= {"font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": INK, "axes.labelsize": 9}
    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE, dpi=DPI, facecolor="white")
    figure.subplots_adjust(left=0.055, right=0.85, bottom=0.14, top=0.87, wspace=0.72)
    left.set_ylim(0, 100)
    resnet, language = figures["resnet20"], figures["smollm2"]
    panel(left, resnet, "ResNet20, CIFAR-10: accuracy (%)", f"dense {resnet['dense']:.1f}")
    right.set_yscale("log")
    values = [value for line in language["lines"].values() for value in line if value is not None]
    right.set_ylim(language["dense"] * 0.9, max(values) * 1.1)
    ticks = [tick for tick in (20, 30, 50, 100, 200, 500, 1000, 2000, 5000, 10000) if tick <= max(values)]
    right.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    right.minorticks_off()
    panel(right, language, "SmolLM2-135M: perplexity (log)", f"dense {language['dense']:.1f}")
    figure.savefig(path)


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    source = given[0] if given else ROOT / "results/without-training.json"
    target = given[1] if len(given) > 1 else ROOT / "docs/without-training.png"
    draw(json.loads(source.read_text()), target)
    print(target)
