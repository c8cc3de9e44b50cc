"""What mkdocs does beside mkdocs.yml: files lie as in the repository, so that links hold in both; a study has its page.

The page is drawn by `sipp report` when the site is built, and shown within the study's README.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).parent.parent
SHOWN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    "docs/**/*.png",
    "results/**/*.md",
    "results/**/*.png",
    "benchmarks/LOG.md",
)
STUDY = "results/iterative-13-epochs"
FRAME = "width: 100%; height: 85vh; border: 1px solid #8884"
EMBEDDED = f"""

## The page of this study

Drawn from the records in this folder when this site was built; [alone, in full width](page.html).

<iframe src="page.html" title="The page of this study" style="{FRAME}"></iframe>
"""

# Wide tables and pictures scroll, instead of the whole page; letters in a picture stay readable on a telephone.
LAYOUT = """
table { display: block; overflow-x: auto; }
.bs-sidebar a { overflow-wrap: anywhere; }
p:has(> img) { overflow-x: auto; }
.col-md-9 p > img { min-width: 600px; margin: 0; padding: 0; border: 0; box-shadow: none; }
p:has(> img) + p > em:only-child { font-size: 0.9em; }
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site under the names they have in the repository, instead of those of docs/ alone."""
    found = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        found.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    found.append(File.generated(config, f"{STUDY}/page.html", content=_page()))
    found.append(File.generated(config, "code.css", content=_colours()))
    return Files(found)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page; the study's with its page below it."""
    return markdown + EMBEDDED if page.file.src_uri == f"{STUDY}/README.md" else markdown


def _page() -> str:
    """The page of the study, as its README says it is made."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "page.html"
        command = [sys.executable, "-m", "sipp", "report", ROOT / STUDY, "-o", path, "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return path.read_text(encoding="utf-8")


def _colours() -> str:
    """How code is coloured, on light and on dark ground, and what else the theme does not do."""
    light = HtmlFormatter(style="tango").get_style_defs(".codehilite")
    dark = HtmlFormatter(style="github-dark").get_style_defs("[data-bs-theme=dark] .codehilite")
    return f"{light}\n{dark}\n{LAYOUT}"
