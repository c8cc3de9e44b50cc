"""Draws docs/gallery/*.png: a page, a notebook's view and a study's page, as Chromium shows them.

python benchmarks/draw_gallery.py, from the repository; needs Chromium, Pillow and the extras report, train and hf.
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

from PIL import Image

ROOT = Path(__file__).parent.parent
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000")
HEADER = re.compile(r"<header.*?</header>", re.S)
CELL = '<body style="margin: 16px; font: 16px sans-serif"><code style="color: #666">[3]: pruned</code>'


def draw(html: str, name: str, size: tuple[int, int]) -> None:
    """The top of a page of this width, as a picture of this size."""
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


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # stand_ins.py writes where it is called
        draw(network(Path(place)), "network.png", (1100, 600))
        draw(notebook(), "notebook.png", (900, 464))
        draw(study(Path(place)), "study.png", (1100, 700))
