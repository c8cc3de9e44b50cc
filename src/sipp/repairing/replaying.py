"""Runs a network many times while its weights are refitted, and reuses outputs that are final.

Weights are refitted in the order of execution. So everything that a pass computes before the first weight that is not
refitted yet is the same in every later pass: the outputs of the modules that have finished by then are kept, and
returned in place of a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sipp.inputs.restore import replaced_forwards
from sipp.results.numerics import for_device

REPLAY_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}  # of outputs that are kept; others are recomputed

# How outputs are reused: after a comparison with a full pass, without one since other blocks have passed it, or not
ReplayMode = Literal["check", "trust", "off"]

Path = tuple[tuple[str, int], ...]  # of a call: a module's name and its call number, from outside to inside


@dataclass(frozen=True)
class _Kept:
    """An output, and the version of its tensor, which an in-place write raises."""

    output: Any
    tensor: Tensor
    version: int

    @property
    def n_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def is_intact(self) -> bool:
        return self.tensor._version == self.version


def _only_tensor(output: Any) -> Tensor | None:
    """The tensor that an output is, or that comes first in a tuple followed by None only; None for other outputs.

    Stricter than the state of a block: subclasses and inference tensors may change without a new version.
    """
    if type(output) is tuple and output and all(value is None for value in output[1:]):
        output = output[0]
    return output if type(output) is Tensor and not output.is_inference() else None


@dataclass
class Replay:
    """The final outputs of one network's modules, batch by batch."""

    mode: ReplayMode = "check"
    kept: dict[int, dict[Path, _Kept]] = field(default_factory=dict)
    is_checked: bool = False  # compared with a full pass, and it changed nothing

    @property
    def next_mode(self) -> ReplayMode:
        """How the next block of the same network is replayed."""
        return "trust" if self.mode == "check" and self.is_checked else self.mode

    @contextmanager
    def running(
        self, model: nn.Module, batch: int, unfinished: Collection[nn.Module], unread: Collection[nn.Module] = ()
    ) -> Iterator[None]:
        """A context for one pass over a batch; `unfinished` are the modules whose weights are still to change.

        Those of them that are `unread` give zeros: nothing that the pass is for depends on their values.
        """
        first = next(model.parameters(), None)
        if self.mode == "off" or first is None:  # such as an activation among named blocks
            yield
            return
        most = for_device(REPLAY_BYTES, first.device)
        calls = _Calls(self.kept.get(batch, {}), most - self._n_bytes())
        forwards = (
            (module, calls.stopping(zeros_of(module) if module in unread else module.forward))
            if module in unfinished
            else (module, calls.watching(name, module.forward))
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        )
        try:
            with replaced_forwards(forwards):
                yield
        finally:
            self.kept[batch] = {path: kept for path, kept in calls.kept.items() if kept.is_intact}

    def switch_off(self) -> None:
        """Recomputes everything from now on."""
        self.mode = "off"
        self.kept.clear()

    def _n_bytes(self) -> int:
        return sum(kept.n_bytes for by_path in self.kept.values() for kept in by_path.values())


def gives_zeros(module: nn.Module) -> bool:
    """Whether the shape of a module's output is known without running it."""
    return type(module) is nn.Linear


def zeros_of(module: Any) -> Callable[[Tensor], Tensor]:
    """A forward that gives zeros in the shape of this linear layer's output."""

    def zeros(input: Tensor) -> Tensor:
        return input.new_zeros(*input.shape[:-1], module.out_features)

    return zeros


@dataclass
class _Calls:
    """The calls of modules in one pass, identified by their paths."""

    kept: dict[Path, _Kept]
    n_bytes_left: int
    is_stopped: bool = False
    around: list[tuple[Path, Counter[str]]] = field(default_factory=lambda: [((), Counter())])

    def stopping(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module whose weights will change: from its call on, nothing is kept."""

        def stopped(*args: Any, **kwargs: Any) -> Any:
            self.is_stopped = True
            return forward(*args, **kwargs)

        return stopped

    def watching(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module: returns the kept output if there is one, and keeps the output if it is final."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            outer, n_calls = self.around[-1]
            path = (*outer, (name, n_calls[name]))
            n_calls[name] += 1
            if path in self.kept:
                return self.kept[path].output
            self.around.append((path, Counter()))
            try:
                output = forward(*args, **kwargs)
            finally:
                self.around.pop()
            tensor = _only_tensor(output)
            if not self.is_stopped and tensor is not None:
                self._keep(path, _Kept(output, tensor, tensor._version))
            return output

        return watched

    def _keep(self, path: Path, kept: _Kept) -> None:
        """Keeps an output, and drops those of the calls inside this one."""
        inside = {at for at in self.kept if at[: len(path)] == path}
        n_bytes_left = self.n_bytes_left + sum(self.kept[at].n_bytes for at in inside) - kept.n_bytes
        if n_bytes_left >= 0:
            self.kept = {at: other for at, other in self.kept.items() if at not in inside} | {path: kept}
            self.n_bytes_left = n_bytes_left
