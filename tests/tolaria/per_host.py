"""The oracle: one host at a time, stock torch modules and optimisers, plain Python for the rest.

It shares no code with `kasmina.lifecycle`, `kasmina.blending` or `tolaria.population`: what they do
for a whole population with arrays is written here once more, from the rules, for a single slot
and a single host.
"""

import math
from dataclasses import dataclass

from esper.leyline.constants import EMBARGO_STEPS, AlphaCurve
from esper.leyline.stages import LifecycleError, SeedStage


def along(kind: AlphaCurve, fraction: float) -> float:
    """How far along a ramp alpha is."""
    if fraction >= 1.0:
        return 1.0
    if kind == AlphaCurve.LINEAR:
        return fraction
    if kind == AlphaCurve.COSINE:
        return (1.0 - math.cos(math.pi * fraction)) / 2.0
    low, here = 1.0 / (1.0 + math.exp(5.0)), 1.0 / (1.0 + math.exp(5.0 - 10.0 * fraction))
    return (here - low) / (1.0 - 2.0 * low)


@dataclass
class SlotLife:
    """One slot's life, a field at a time."""

    stage: SeedStage = SeedStage.DORMANT
    stage_age: int = 0
    total_age: int = 0
    alpha: float = 0.0
    alpha_start: float = 0.0
    alpha_target: float = 0.0
    ramp_steps: int = 0
    ramp_elapsed: int = 0
    curve: int = 0
    style: int = 0
    blueprint: int = -1

    def germinate(self, blueprint, style, ramp_steps, alpha_target, curve, behind_host=False):
        self._require(self.stage == SeedStage.DORMANT)
        self.blueprint, self.style, self.curve = blueprint, style, curve
        self.alpha_target = alpha_target
        self.ramp_steps = ramp_steps
        self._enter(SeedStage.TRAINING if behind_host else SeedStage.BLENDING)

    def advance(self):
        if self.stage == SeedStage.TRAINING:
            self._enter(SeedStage.BLENDING)
        else:
            self._require(self.stage == SeedStage.BLENDING)
            self._arrive()

    def set_alpha_target(self, alpha_target, ramp_steps, curve):
        self._require(self.stage == SeedStage.HOLDING and alpha_target != self.alpha_target)
        self.curve = curve
        self._ramp(alpha_target, ramp_steps)

    def prune(self, ramp_steps):
        live = (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING)
        self._require(self.stage in live and self.total_age >= 1)
        if self.stage == SeedStage.TRAINING:
            self.uproot()
        else:
            self._ramp(0.0, ramp_steps)

    def fossilize(self):
        self._require(self.stage == SeedStage.HOLDING)
        self._enter(SeedStage.FOSSILIZED)

    def uproot(self):
        """The seed is gone; the slot rests."""
        self.__init__(stage=SeedStage.EMBARGOED)

    def begin_step(self):
        if self.stage == SeedStage.BLENDING:
            self.ramp_elapsed += 1
            part = along(self.curve, self.ramp_elapsed / self.ramp_steps)
            self.alpha = self.alpha_start + (self.alpha_target - self.alpha_start) * part
            if self.ramp_elapsed == self.ramp_steps:
                self.alpha = self.alpha_target

    def end_step(self):
        self.stage_age += 1
        if self.blueprint >= 0:
            self.total_age += 1
        if self.stage == SeedStage.BLENDING and self.ramp_elapsed == self.ramp_steps:
            self._arrive()
        elif self.stage == SeedStage.EMBARGOED and self.stage_age == EMBARGO_STEPS:
            self.__init__()

    def _ramp(self, alpha_target, ramp_steps):
        self.alpha_start, self.alpha_target = self.alpha, alpha_target
        self.ramp_steps, self.ramp_elapsed = ramp_steps, 0
        self._enter(SeedStage.BLENDING)
        if ramp_steps == 0:
            self._arrive()

    def _arrive(self):
        if self.alpha_target == 0.0:
            self.uproot()
        else:
            self.alpha = self.alpha_target
            self._enter(SeedStage.HOLDING)

    def _enter(self, stage):
        if stage != self.stage:
            self.stage, self.stage_age = stage, 0

    def _require(self, legal):
        if not legal:
            raise LifecycleError(f"not legal in {self.stage.name} at age {self.total_age}")
