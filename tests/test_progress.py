"""The one rule of progress: by default long work shows it to a person at a terminal, and to nobody else."""

from __future__ import annotations

import inspect
import sys
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from torch import nn

import sipp
from sipp import progress
from sipp.progress import progress_bar, progress_line

LONG = (
    "prune",
    "prune_to",
    "prune_on_disk",
    "repair",
    "compare",
    "assess",
    "certify",
    "certify_accuracy",
    "check_assumption",
    "sensitivity",
    "gradual",
    "perplexity",
    "evaluate",
    "shrink",
)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def talker() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))


def points(n: int = 60) -> torch.Tensor:
    return torch.rand(n, 8, generator=torch.Generator().manual_seed(n))


def from_files(**options: bool) -> None:
    with TemporaryDirectory() as made:
        folder, layer = Path(made), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        many = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        save_file(many.state_dict(), folder / "model.safetensors")
        sipp.prune_on_disk(many.to("meta"), folder, torch.rand(12, 5, 8), folder / "out", keep=0.9, **options)


def work(name: str, **options: bool) -> None:
    """One call of a long function."""
    pruned = sipp.prune(net(), points(), keep=0.9, progress=False)
    holdout = [(points(80), torch.arange(80) % 4)]
    calls = {
        "prune": lambda: sipp.prune(net(), points(), keep=0.9, **options),
        "prune_to": lambda: sipp.prune_to(net(), points(), points(90), epsilon=0.9, method="magnitude", **options),
        "prune_on_disk": lambda: from_files(**options),
        "repair": lambda: sipp.repair(net(), pruned, points(), **options),
        "compare": lambda: sipp.compare(net(), points(), keeps=(0.5,), methods=("magnitude",), **options),
        "assess": lambda: sipp.assess(net(), pruned.model, points(), **options),
        "certify": lambda: sipp.certify(net(), pruned, points(80), **options),
        "certify_accuracy": lambda: sipp.certify_accuracy(net(), pruned, holdout, **options),
        "check_assumption": lambda: sipp.check_assumption(net(), points(6), points(3), **options),
        "sensitivity": lambda: sipp.sensitivity(net(), points(), **options),
        "perplexity": lambda: sipp.perplexity(talker(), torch.arange(24).reshape(4, 6) % 5, **options),
        "evaluate": lambda: sipp.evaluate(net(), pruned, holdout, **options),
        "shrink": lambda: sipp.shrink(net(), points(), weights=0.5, **options),
        "gradual": lambda: sipp.gradual(net(), lambda step: None, points(), keep=0.5, steps=20, **options),
    }
    calls[name]()


WORDS = {
    "prune": ("scoring", "cutting"),
    "prune_to": ("where to begin", "walking the levels"),
    "prune_on_disk": ("blocks", "layers.1"),
    "repair": ("repairing",),
    "compare": ("comparing",),
    "assess": ("scoring",),
    "certify": ("certifying",),
    "certify_accuracy": ("certifying",),
    "check_assumption": ("looking at the assumption", "9/9"),
    "sensitivity": ("scoring",),
    "perplexity": ("measuring", "4/4"),
    "evaluate": ("measuring",),
    "shrink": ("comparing channels", "removing channels"),
    "gradual": ("gradual: step 7 of 20", "gradual: step 12 of 20, 50.00% of the weights left (cut 10 of 10)"),
}


@pytest.mark.parametrize("name", LONG)
def test_a_person_at_a_terminal_sees_it_by_default_and_nobody_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")  # says that a log takes colours, not that somebody looks at it
    for stream, options, is_shown in (
        (Terminal(), {}, True),
        (Terminal(), {"progress": False}, False),
        (StringIO(), {}, False),
    ):
        out = StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", out)
        work(name, **options)
        found = stream.getvalue()
        assert out.getvalue() == "" and bool(found) == is_shown, found
        for word in WORDS[name] if is_shown else ():
            assert word in found, word


def test_every_option_of_this_name_has_the_same_default() -> None:
    having = [name for name in sipp.__all__ if inspect.isfunction(getattr(sipp, name))]
    found = {name: inspect.signature(getattr(sipp, name)).parameters.get("progress") for name in having}
    assert {name for name, option in found.items() if option is not None} == set(LONG)
    assert all(option.default is True for option in found.values() if option is not None)


def test_a_dumb_terminal_and_a_closed_stderr_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert progress.console_of_person() is not None
    monkeypatch.setenv("TERM", "dumb")
    assert progress.console_of_person() is None
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar("work", 3, shown=True) as advance:
        advance(1)
    progress_line("work", shown=True)


def test_a_bar_works_inside_another_rich_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with Progress(console=Console(stderr=True)), progress_bar("work", 3, shown=True) as advance:
        advance(1)


class Clock:
    """A clock that moves on by some seconds with each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_log_gets_a_few_lines_of_long_work_and_none_of_short(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for step in (0.01, 1.0):
        log = StringIO()
        monkeypatch.setattr(sys, "stderr", log)
        monkeypatch.setattr(progress, "monotonic", Clock(step))
        with progress_bar("fitting", 100, shown=True) as advance:
            for _ in range(100):
                advance(1)
        found[step] = log.getvalue().splitlines()
    assert found[0.01] == []
    assert found[1.0] == [
        "sipp: fitting: 10 of 100, about 90 s left", "sipp: fitting: 20 of 100, about 80 s left",
        "sipp: fitting: 40 of 100, about 60 s left", "sipp: fitting: 80 of 100, about 20 s left",
    ]  # fmt: skip
    monkeypatch.setattr(progress, "monotonic", Clock(1.0))
    for options in ({"total": None, "shown": True}, {"total": 100, "shown": False}):
        log = StringIO()
        monkeypatch.setattr(sys, "stderr", log)
        with progress_bar("fitting", **options) as advance:  # type: ignore[arg-type]
            advance(99)
        assert log.getvalue() == ""


def test_no_estimate_before_a_tenth_is_done_and_none_of_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred seconds of choosing, then a second a unit: 'about 75 min left' would be said of two minutes."""
    log, clock = StringIO(), Clock(0.0)
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(progress, "monotonic", clock)
    with progress_bar("fitting", 1000, shown=True, in_percent=True) as advance:
        clock.now = 100.0
        for _ in range(999):
            clock.now += 1.0
            advance(1)
    assert log.getvalue().splitlines() == [
        "sipp: fitting: 0%", "sipp: fitting: 10%, about 15 min left",
        "sipp: fitting: 30%, about 12 min left", "sipp: fitting: 71%, about 5 min left",
    ]  # fmt: skip
