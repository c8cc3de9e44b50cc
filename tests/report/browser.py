"""A page in a real browser: what went wrong in it, what it asked the network for, and what a script saw there."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
NARROWEST = 500  # no window of a headless Chromium is narrower; below, the page goes into a frame
LIMIT_S = 120
# Time in the page runs as fast as the work in it allows, but pictures are made outside of it: on a busy machine the
# first budget is over before they are there.
BUDGETS_MS = (4_000, 40_000, 400_000)
NO_ORIGIN = "not an origin"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip

WATCH = (Path(__file__).parent / "watch.js").read_text()
TELL = (Path(__file__).parent / "tell.js").read_text()
LISTEN = """
addEventListener("message", (event) => {
  const pre = document.createElement("pre"); pre.id = "found"; pre.textContent = event.data; document.body.append(pre);
});
"""


@dataclass(frozen=True)
class Visit:
    """What a browser saw."""

    faults: list[str]
    outside: list[str]  # addresses that were asked for and are no part of the page
    seen: Any
    width: int
    scroll: int  # the width of the content: above `width` the page scrolls sideways

    def problems(self) -> list[str]:
        """Everything that must not happen on any page."""
        wide = [f"{self.scroll} px of content in {self.width} px"] if self.scroll > self.width else []
        return [*self.faults, *self.outside, *wide]


def _injected(text: str, steps: str) -> str:
    """The page with the two scripts."""
    scripts = (WATCH, TELL.replace("STEPS();", steps))
    text = text.replace("<title>", f"<script>{scripts[0]}</script><title>", 1)
    return text.replace("</body>", f"<script>{scripts[1]}</script></body>", 1)


DARK = "--blink-settings=preferredColorScheme=0"


def visit(page: str, folder: Path, *, width: int, steps: str = "return null;", dark: bool = False) -> Visit:
    """What a browser of this width finds on the page, after the steps (the body of an async function)."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "page.html"
    target.write_text(_injected(page, steps), encoding="utf-8")
    if width < NARROWEST:
        frame = f'<iframe src="page.html" style="width:{width}px;height:2000px;border:0"></iframe>'
        target = folder / "frame.html"
        target.write_text(f"<body style='margin:0'><script>{LISTEN}</script>{frame}</body>", encoding="utf-8")
    log = folder / "net.json"
    flags = ("--dump-dom", f"--log-net-log={log}", "--net-log-capture-mode=Everything", *([DARK] if dark else []))
    for budget_ms in BUDGETS_MS:
        dumped = _chromium(folder, target, width, *flags, budget_ms=budget_ms)
        match = re.search(r'<pre id="found">(.*?)</pre>', dumped, re.S)
        if match is not None:
            break
    assert match is not None, dumped[:2000]
    return Visit(outside=_asked_for(log), **json.loads(html.unescape(match[1])))


def _chromium(folder: Path, target: Path, width: int, *flags: str, budget_ms: int) -> str:
    assert CHROMIUM is not None
    window = f"--window-size={width},1000"
    places = (f"--user-data-dir={folder / 'profile'}", window, f"--virtual-time-budget={budget_ms}")
    command = [CHROMIUM, *FLAGS, *places, *flags, target.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _asked_for(log: Path) -> list[str]:
    """Addresses outside of the page that it asked for; what the browser asks for itself has no origin."""
    content = json.loads(log.read_text(errors="replace"))
    requests = [event.get("params", {}) for event in content["events"]]
    own = [one for one in requests if one.get("initiator", NO_ORIGIN) != NO_ORIGIN]
    return sorted({one["url"] for one in own if re.match(r"(https?|wss?|ftp):", one.get("url", ""))})
