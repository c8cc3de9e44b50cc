"""The walk of `prune` in CONTRIBUTING.md is the way that a call takes: its files, their order, how many there are."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fresh_process import run_python
from torch import nn

import sipp

HOME = Path(sipp.__file__).parent
TEXT = (HOME.parents[1] / "CONTRIBUTING.md").read_text()
DRAWN = TEXT.partition("**The walk of `prune`**")[2].partition("## How to add something")[0]


def calls(**options: Any) -> list[tuple[str, str]]:
    """All calls within one call of `prune`, in order: the files of caller ("" outside of the package) and called."""
    torch.manual_seed(0)
    prune = sipp.prune
    net, points = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10)), torch.rand(64, 20)
    prune(net, points, keep=0.5, progress=False, **options)  # what is loaded and compiled once is no part of it
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        called = _file(frame)
        if event == "call" and frame.f_code.co_name != "<module>" and called:
            found.append((_file(frame.f_back), called))

    sys.setprofile(note)
    try:
        prune(net, points, keep=0.5, progress=False, **options)
    finally:
        sys.setprofile(None)
    return found


def _file(frame: FrameType | None) -> str:
    file = Path() if frame is None else Path(frame.f_code.co_filename)
    return file.relative_to(HOME).as_posix() if file.is_relative_to(HOME) else ""


def entered(**options: Any) -> list[str]:
    """The files in which a function is called by one call of `prune`, in this order."""
    return list(dict.fromkeys(called for _, called in calls(**options)))


def test_prune_enters_files_in_the_documented_order() -> None:
    drawn = re.findall(r"^ +(\w+/\w+\.py)  ", DRAWN, flags=re.MULTILINE)
    met = entered(method="sipp-det")
    assert len(drawn) >= 8 and [file for file in met if file in drawn] == drawn
    named = [file for file in re.findall(r"(?:\w+/)+\w+\.py", DRAWN) if not file.startswith("tests/")]
    assert all((HOME / file).is_file() for file in named) and len(named) > len(drawn)


def test_prune_enters_at_most_as_many_files_as_documented() -> None:
    most = r"enters at most (\d+) files with `sipp-det`, (\d+) with the default method, (\d+) with repair"
    said = re.search(most, DRAWN)
    assert said is not None
    options: list[dict[str, Any]] = [{"method": "sipp-det"}, {}, {"method": "magnitude", "repair": True}]
    assert all(len(entered(**given)) <= int(number) for given, number in zip(options, said.groups(), strict=True))


def test_prune_loads_at_most_as_many_modules_as_documented() -> None:
    said = re.search(r"loaded at most (\d+) modules of sipp with `sipp-det`", DRAWN)
    assert said is not None
    done = run_python(
        "import sipp, sys, torch; sipp.prune(torch.nn.Linear(4, 3), torch.rand(8, 4), keep=0.5, method='sipp-det')\n"
        "print(sum(name.split('.')[0] == 'sipp' for name in sys.modules))\n"
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= int(said.group(1))
