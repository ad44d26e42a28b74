"""Settings that are tuned on training types before arms are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from esper.tamiyo.heuristic import HeuristicConfig, HeuristicController
from esper.tamiyo.scripted import ConstantPlan
from growth_evaluation.paired_experiment import Arm, ArmOutcome, PairedExperiment


@dataclass(frozen=True, eq=False)
class Sweep:
    """Settings tried, and the validation result of each."""

    tried: tuple[dict[str, float], ...]
    results: tuple[float, ...]
    trained: tuple[ArmOutcome, ...]

    @property
    def num_networks(self) -> int:
        return sum(outcome.validation.numel() for outcome in self.trained)

    @property
    def best(self) -> dict[str, float]:
        return self.tried[self.results.index(max(self.results))]


def tune_learning_rate(
    experiment: PairedExperiment, learning_rates: Sequence[float], *, rng_seed: int
) -> Sweep:
    """Accuracy of hosts without seeds at each learning rate."""
    outcomes = []
    for rate in learning_rates:
        at_rate = with_learning_rate(experiment, rate)
        outcomes += at_rate.run([Arm("host alone", ConstantPlan())], rng_seed=rng_seed)
    return Sweep(
        tuple({"learning_rate": rate} for rate in learning_rates),
        tuple(float(outcome.validation.mean()) for outcome in outcomes),
        tuple(outcomes),
    )


def with_learning_rate(experiment: PairedExperiment, rate: float) -> PairedExperiment:
    """The same hosts, which learn at another rate."""
    config = replace(experiment.hosts.config, host_learning_rate=rate)
    return replace(experiment, hosts=replace(experiment.hosts, config=config))


def tune_heuristic(
    experiment: PairedExperiment, scales: Sequence[float], rents: Sequence[float], *, rng_seed: int
) -> Sweep:
    """The heuristic's score with two of its constants scaled: `gain_scale` and `crowding`."""
    usual = HeuristicConfig()
    tried = tuple(
        {"gain_scale": usual.gain_scale * gain, "crowding": usual.crowding * crowding}
        for gain, crowding in product(scales, scales)
    )
    arms = [Arm("heuristic", heuristic_with(settings), tuple(rents)) for settings in tried]
    outcomes = experiment.run(arms, rng_seed=rng_seed)
    scores = tuple(float(outcome.scores(rents, "validation").mean()) for outcome in outcomes)
    return Sweep(tried, scores, tuple(outcomes))


def heuristic_with(settings: Mapping[str, float]) -> HeuristicController:
    """The heuristic with other values for some of its constants."""
    return HeuristicController(replace(HeuristicConfig(), **settings))  # type: ignore[arg-type]
