"""The blend that `sipp-blend` chose, and all that it tried (T20)."""

from __future__ import annotations

from dataclasses import dataclass

from sipp.results import words
from sipp.results.options import Reduce
from sipp.results.sheet import Sheet, Table, shown


@dataclass(frozen=True)
class BlendTrial:
    """One candidate of a blend, and how far its mask changes the output."""

    p: float
    reduce: Reduce
    error: float  # ||f^ - f|| / ||f|| over the held-back points; infinite if an output is not finite
    is_shared: bool = False  # ranked by LAMP's shares of the blend, layer by layer
    by_rows: bool = False  # no blend: magnitude times the norm of the input, compared within rows

    @property
    def name(self) -> str:
        if self.by_rows:
            return "magnitude times input length within rows"
        if self.p == 0:
            return "magnitude"
        blend = f"{self.reduce} sensitivity" if self.p == 1 else f"{self.reduce} sensitivity^{self.p:g}"
        return f"{blend} in shares of its layer" if self.is_shared else blend


@dataclass(frozen=True)
@shown
class BlendChoice:
    """The blend that was chosen, and all candidates."""

    taken: BlendTrial
    tried: tuple[BlendTrial, ...]
    n_inputs: int  # 0: the output has no real numbers, so nothing was compared
    is_held_back: bool = True  # the points were held back from scoring; False: there were too few

    ALSO_IN_JSON = ("sentence",)
    NOISE = 0.05  # errors within this relative difference count as equal
    MAGNITUDE_NOISE = 0.1  # the same for magnitude, which uses no data: a few points must not outvote it
    LOST = 0.9  # above this relative error next to nothing of the output is left: all such errors are equal

    @property
    def sentence(self) -> str:
        """The choice in one sentence, with its change of the output and those of others."""
        if self.n_inputs == 0:
            return f"{self.taken.name}: nothing to compare, the output has no real numbers"
        others = ("magnitude", "max sensitivity")
        known = {trial.name: trial.error for trial in self.tried if trial.name in others and trial != self.taken}
        beside = ", ".join(f"{name} {error:.3g}" for name, error in known.items())
        held = "held-back " if self.is_held_back else ""
        inputs = f"1 {held}input" if self.n_inputs == 1 else f"{self.n_inputs:,} {held}inputs"
        where = "used to choose it" if self.is_held_back else "that were also used for scoring"
        text = f"{self.taken.name}: output error {self.taken.error:.3g}" + (f" ({beside})" if beside else "")
        return f"{text} on {inputs} {where}{self._why_not_the_least()}"

    def _why_not_the_least(self) -> str:
        """The rule by which a candidate with a smaller error was passed over, if one was."""
        least = min(trial.error for trial in self.tried)
        if least >= self.taken.error:
            return ""
        if least > self.LOST:
            return f"; above {self.LOST:g} nothing of the output is left, so the simplest score was taken"
        noise = self.MAGNITUDE_NOISE if self.taken.name == "magnitude" else self.NOISE
        return f"; another had {least:.3g}, and a lead of less than {words.percent(noise)} counts as chance"

    @property
    def sheet(self) -> Sheet:
        tried = sorted(self.tried, key=lambda trial: trial.error)
        table = Table.of(tried, {"score": "name", "output error": "error"}, bars=("output error",))
        alone = "no other was tried: outputs of an untrained network do not predict those of the trained one"
        return Sheet(self.sentence, tables=(table,), note="" if len(tried) > 1 else alone)
