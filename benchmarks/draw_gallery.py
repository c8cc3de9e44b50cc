"""Draws docs/picture.png, and docs/gallery/*.png: a page, a notebook's view and a study's page in Chromium.

python benchmarks/draw_gallery.py [demo network notebook study], from the repository; all of them, or these. Needs
Matplotlib, for all but the demo also Chromium and Pillow, and the extras report, train and hf.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from draw_results import DPI, SIZE, draw_curves
from matplotlib.figure import Figure

from sipp_lab.demo import RECIPE, SETTINGS
from sipp_lab.page import read_results, series
from sipp_lab.recipes import load_recipe
from sipp_lab.runs.folder import Run
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import run

ROOT = Path(__file__).parent.parent
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000")
HEADER = re.compile(r"<header.*?</header>", re.S)
CELL = '<body style="margin: 16px; font: 16px sans-serif"><code style="color: #666">[3]: pruned</code>'


def draw(html: str, name: str, size: tuple[int, int]) -> None:
    """The top of a page of this width, as a picture of this size."""
    from PIL import Image

    browser = next(found for one in CHROMIUM if (found := shutil.which(one)))
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "picture.png"
        page.write_text(html, encoding="utf-8")
        places = (f"--user-data-dir={folder}/profile", f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}")
        subprocess.run([browser, *FLAGS, *places, page.as_uri()], check=True, capture_output=True)
        Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE).save(ROOT / "docs/gallery" / name)


def network(folder: Path) -> str:
    """The page that the README's commands end in."""
    runpy.run_path(str(ROOT / "examples/paths/stand_ins.py"), run_name="__main__")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in readme.split("```sh\n")[1].split("```")[0].splitlines():
        subprocess.run([sys.executable, "-m", *line.split()], check=True, cwd=folder)
    return (folder / "page.html").read_text(encoding="utf-8")


def notebook() -> str:
    """The view of the first tutorial's network."""
    tutorial = (ROOT / "docs/tutorials/first-network.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in tutorial.split("```python\n")[1:]]
    names: dict[str, object] = {}
    exec("\n".join(blocks[:2]), names)
    return f'<meta charset="utf-8">{CELL}{names["pruned"]._repr_html_()}</body>'  # type: ignore[attr-defined]


def study(folder: Path) -> str:
    """The page of a study, without the links to its runs."""
    words = ("report", ROOT / "results/iterative-13-epochs", "-o", folder / "study.html")
    subprocess.run([sys.executable, "-m", "sipp", *words], check=True)
    return HEADER.sub("", (folder / "study.html").read_text(encoding="utf-8"), count=1)


def demo(folder: Path) -> None:
    """What `sipp demo` trains, just pruned and retrained."""
    run(load_recipe(RECIPE, settings=SETTINGS), RunOptions(out=folder / "demo", device="cpu"))
    (made,) = (found for found in read_results([folder / "demo"])[0] if isinstance(found, Run))
    figure = Figure(figsize=(2 * SIZE[0], SIZE[1] + 0.4), layout="constrained")
    for axes, metric, title in zip(figure.subplots(1, 2), ("before_top1", "top1"), ("just pruned", "retrained")):
        if (dense := series.dense_mean(made, metric)) is not None:
            axes.axhline(100 * dense, color="#666666", linewidth=0.8, linestyle="--", label="dense")
        draw_curves(axes, series.metric_curves(made, metric), title, "top-1 accuracy (%)")
    figure.savefig(ROOT / "docs/picture.png", dpi=DPI)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # stand_ins.py writes where it is called
        if not names or "demo" in names:
            demo(Path(place))
        if not names or "network" in names:
            draw(network(Path(place)), "network.png", (1100, 600))
        if not names or "notebook" in names:
            draw(notebook(), "notebook.png", (900, 464))
        if not names or "study" in names:
            draw(study(Path(place)), "study.png", (1100, 700))


if __name__ == "__main__":
    main(sys.argv[1:])
