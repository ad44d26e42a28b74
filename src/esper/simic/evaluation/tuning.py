"""What is settled before arms are compared: the host's learning rate, the heuristic's constants.

Both are chosen on the types that the controller was trained on, by validation rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from esper.simic.evaluation.trial import Arm, Cost, Trial
from esper.tamiyo.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.scripted import ConstantPlan
from esper.tolaria.optimizers import AdamW


@dataclass(frozen=True)
class Sweep:
    """Settings tried, what each was worth on validation rows, and which one is used."""

    tried: tuple[dict[str, float], ...]
    worth: tuple[float, ...]
    cost: Cost

    @property
    def best(self) -> dict[str, float]:
        return self.tried[self.worth.index(max(self.worth))]


def tune_learning_rate(trial: Trial, learning_rates: Sequence[float], *, rng_seed: int) -> Sweep:
    """The accuracy of hosts that nothing grows in, at each learning rate."""
    harvests = [
        replace(trial, optimizer=AdamW(learning_rate=rate)).run(
            [Arm("host alone", ConstantPlan(()))], rng_seed=rng_seed
        )[0]
        for rate in learning_rates
    ]
    return Sweep(
        tuple({"learning_rate": rate} for rate in learning_rates),
        tuple(float(harvest.validation.mean()) for harvest in harvests),
        Cost.of(harvests),
    )


def calibrate_heuristic(
    trial: Trial, scales: Sequence[float], rents: Sequence[float], *, rng_seed: int
) -> Sweep:
    """The heuristic's score with two of its beliefs scaled: how much a seed gains, and how far
    seeds take gains from one another."""
    usual = HeuristicConfig()
    tried = [
        {"gain_scale": usual.gain_scale * gain, "crowding": usual.crowding * crowding}
        for gain, crowding in product(scales, scales)
    ]
    arms = [
        Arm("heuristic", HeuristicController(replace(usual, **settings)), tuple(rents))  # type: ignore[arg-type]
        for settings in tried
    ]
    harvests = trial.run(arms, rng_seed=rng_seed)
    return Sweep(
        tuple(tried),
        tuple(float(harvest.validation_scores(rents).mean()) for harvest in harvests),
        Cost.of(harvests),
    )
